"""What stands in a document: commands, Python blocks and code in the text, each with its line."""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"diff", "mermaid", "python", "text", "yaml"}

_MARK = re.compile(r"\bneeds\b.*|\btakes\b.*|\S+ (is|are) yours\b.*")
_COMMENT = re.compile(r"(?:^|\s+)# (.*)$")
_NAMED_FILE = re.compile(r"`([\w./-]+\.py)`\)?:$")
_OWN_CLUSTER = "--image local/host"
_MEANWHILE = re.compile("In another terminal, while it runs|In the second terminal:")


class How(enum.Enum):
    """What is done with a command."""

    RUN = "run"
    MEANWHILE = "run while the one before runs"
    ON_CLUSTER = "run on the tests' cluster"
    MARKED = "marked, its words checked"


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands in a document, at a line."""

    document: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command(Standing):
    text: str
    how: How
    mark: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


@dataclass(frozen=True, slots=True)
class PythonBlock(Standing):
    code: str
    file: str


@dataclass(frozen=True, slots=True)
class Shown(Standing):
    """What a terminal shows (`text`), or how a file changes (`diff`)."""

    language: str
    text: str
    before: str


@dataclass(frozen=True, slots=True)
class Span(Standing):
    """Code within a sentence or a table."""

    text: str


@dataclass(slots=True)
class Document:
    name: str
    steps: list[Command | PythonBlock | Shown] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def commands(self) -> list[Command]:
        return [step for step in self.steps if isinstance(step, Command)]

    @property
    def python(self) -> list[PythonBlock]:
        return [step for step in self.steps if isinstance(step, PythonBlock)]


def read(path: Path) -> Document:
    document = Document(str(path.relative_to(ROOT)))
    before = ""
    for token in MarkdownIt().enable("table").parse(path.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "code_block":
            document.steps += _commands(document.name, line, token.content, before)
        elif token.type == "fence":
            _read_fence(document, line, token, before)
        elif token.type == "inline":
            before = token.content
            document.spans += [
                Span(document.name, line, " ".join(child.content.split()))
                for child in token.children or ()
                if child.type == "code_inline"
            ]
    return document


def _read_fence(document: Document, line: int, token: Token, before: str) -> None:
    language = token.info.strip()
    if language not in LANGUAGES:
        known = ", ".join(sorted(LANGUAGES))
        document.complaints.append(f"{document.name}:{line}: a fenced block says one of {known}; commands are indented")
    elif language == "python":
        named = _NAMED_FILE.search(before)
        document.steps.append(PythonBlock(document.name, line, token.content, named[1] if named else ""))
    elif language in ("diff", "text"):
        document.steps.append(Shown(document.name, line, language, token.content, before))


def _commands(document: str, first: int, block: str, before: str) -> Iterator[Command]:
    usual = How.ON_CLUSTER if _OWN_CLUSTER in block else How.MEANWHILE if _MEANWHILE.search(before) else How.RUN
    standing = ""
    for number, line in _whole_lines(block):
        comment = _COMMENT.search(line)
        text = line[: comment.start()].strip() if comment else line.strip()
        mark = _mark(comment[1]) if comment else ""
        if text:
            found = mark or standing
            yield Command(document, first + number, text, How.MARKED if found else usual, found)
        else:
            standing = mark


def _mark(comment: str) -> str:
    found = _MARK.search(comment)
    return found[0] if found else ""


def _whole_lines(block: str) -> Iterator[tuple[int, str]]:
    """Each line with its number in the block, those that a backslash continues put together."""
    begun, start = "", 0
    for number, line in enumerate(block.splitlines()):
        if not begun:
            start = number
        begun += line.strip() if begun else line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        if begun.strip():
            yield start, begun
        begun = ""


def changed(program: str, difference: str, *, undone: bool = False) -> str:
    """As an editor leaves it, who makes the changes of each part of a `diff` block by hand; or takes them back."""
    removed, added = "+-" if undone else "-+"
    for part in difference.split("@@\n"):
        lines = part.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != added)
        assert program.count(old) == 1, old
        program = program.replace(old, "".join(f"{line[1:]}\n" for line in lines if line[:1] != removed))
    return program
