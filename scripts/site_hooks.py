"""What MkDocs asks for while it builds the site: pages that are not in docs/, and links that lead where they lead in the repository.

Pages of docs/ are written for a Git host, and link to others, and to README.md, by their paths in the repository. Here each path has
its place in the site. Generated pages (`site_reference`, `site_python`) are made at each build, and are in no commit.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from scripts import site_python, site_reference

ROOT = Path(__file__).resolve().parents[1]
AT_THE_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
IN_THE_REPOSITORY = {page: path for path, page in AT_THE_ROOT.items()}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#|/)([^)\s#]+)")
TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~)")
BLOCK = re.compile(r"^([-*] |\d+\. |\|)")


def on_files(files: Files, config: Any) -> Files:
    """Adds what is not in docs/."""
    for path, page in AT_THE_ROOT.items():
        head = "---\nhide: [navigation]\n---\n" if page == "index.md" else ""
        files.append(File.generated(config, page, content=head + (ROOT / path).read_text()))
    for page, text in {**site_reference.pages(), **site_python.pages()}.items():
        files.append(File.generated(config, page, content=text))
    for picture in sorted(set(_pictures_outside())):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return with_blank_lines(with_links_of_the_site(markdown, page.file.src_uri))


def _pictures_outside() -> Iterator[str]:
    """That pages of docs/ show, by their paths in the repository."""
    for path in (ROOT / "docs").glob("*.md"):
        for _, target in LINK.findall(path.read_text()):
            found = posixpath.normpath(posixpath.join("docs", target))
            if found.endswith(".png") and not found.startswith("docs/"):
                yield found


def with_links_of_the_site(markdown: str, page: str) -> str:
    """``page``: its path in the site."""
    if page.startswith("reference/"):
        return markdown
    path = IN_THE_REPOSITORY.get(page, f"docs/{page}")

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        there = AT_THE_ROOT.get(target, target.removeprefix("docs/"))
        text = title_of(target) if link[1].endswith(".md") else link[1]
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}"

    return LINK.sub(led, markdown)


def title_of(path: str) -> str:
    """Of a page of the repository: what stands in a link instead of the name of its file."""
    found = TITLE.search((ROOT / path).read_text())
    return found[1] if found else path


def with_blank_lines(markdown: str) -> str:
    """A list or a table may follow a line of text on a Git host; Python's Markdown takes it for more text, without a line between."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        fenced ^= bool(FENCE.match(line))
        before = lines[-1] if lines else ""
        if (
            not fenced
            and BLOCK.match(line)
            and before
            and not before.startswith(("#", " "))
            and not BLOCK.match(before)
        ):
            lines += [""] if not _in_a_list(lines) else []
        lines.append(line)
    return "\n".join(lines)


def _in_a_list(lines: list[str]) -> bool:
    """The last line goes on with an item that began before."""
    for line in reversed(lines):
        if not line:
            return False
        if BLOCK.match(line):
            return True
    return False
