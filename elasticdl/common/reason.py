"""What a person is told of an exception in one line: where in their code, of which type, what it says, and what helps.

All reasons are made here, as what an exception says is often not its first line, and sometimes nothing.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl.common.errors import ElasticDLError, UserError

PACKAGE = Path(__file__).resolve().parents[1]
TRACED = "in user code:"  # so TensorFlow begins what was raised in a function that it was tracing
KERAS = re.compile(  # how Keras wraps what a layer raised
    r"Exception encountered when calling [^\n]*\n\n(?:\x1b\[1m)?(?P<said>.*?)(?:\x1b\[0m)?\n\nArguments received by ",
    re.DOTALL,
)
# How torch wraps what a process that loads data raised: the traceback, at whose end stands what was said.
LOADER = re.compile(r"Caught (?P<type>\w+) in .*\nOriginal Traceback.*\n(?:\w+\.)*(?P=type): (?P<said>.+)", re.DOTALL)
PLACE_IN_GRAPH = re.compile(r"^\{\{.*?\}\} ?| ?\[Op:\w+\].*$")
PLACED = re.compile(r"\S+:\d+: ")  # errors of this package may say their place themselves
DETAILS = ("expected:", "received:")  # what is said of these on further lines is kept
GUARD = 'put what the script does below `if __name__ == "__main__":`, as processes that load data import it anew'
LAUNCHED = "(?:LOCAL_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_ADDR|MASTER_PORT"  # variables that torchrun sets
HELP = {  # by type and text
    "finished its bootstrapping phase": GUARD,
    "exited unexpectedly": "what it said stands further up in this worker's log",
    f"environment variable (?:{LAUNCHED}) expected|KeyError: '(?:{LAUNCHED})'|Default process group has not been initialized": (
        'the script is written for torchrun: docs/migration.md has under "From torchrun" what becomes of each line'
    ),
}
# In the path of a file: of an installed library, or of Python's own.
LIBRARIES = frozenset({"site-packages", "dist-packages"})
STANDARD = re.compile(r"/lib(64)?/python3[.\d]*t?/")


def reason(error: BaseException) -> str:
    """``FILE:LINE: TYPE: WHAT IT SAYS; WHAT HELPS``, as far as each part is known. Of this package's own errors it is their text,
    which says all that."""
    line = str(error) if isinstance(error, ElasticDLError) else ""
    line = line or one_line(error)
    where = "" if PLACED.match(line) else place(error, is_users)
    return f"{where + ': ' if where else ''}{with_help(line, f'{type(error).__name__}: {error}')}"


def with_help(line: str, said: str = "") -> str:
    """A line about an exception, and what helps if that is known. ``said``: type and text of the exception, if there is more of it."""
    helps = next((hint for told, hint in HELP.items() if re.search(told, said or line)), "")
    return f"{line.rstrip('.')}; {helps}" if helps else line


def tell_uncaught_in_one_line() -> None:
    """From now on a UserError that the script does not catch ends it with one line and exit code 2, without a traceback."""
    sys.excepthook = functools.partial(_tell, sys.excepthook)


def _tell(
    otherwise: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    if not isinstance(error, UserError):
        otherwise(kind, error, trace)
        return
    print(reason(error), file=sys.stderr)
    sys.exit(2)


def one_line(error: BaseException) -> str:
    """Type and first line of an exception, with what it says on further lines of what was expected and received.

    Of one that says nothing the line of code that raised it.
    """
    said = _said(error)
    lines = said.strip().splitlines()
    if said.startswith("\n"):  # a text of several paragraphs, whose first sentence has several lines
        lines = [" ".join(said.strip().partition("\n\n")[0].split())] if lines else []
    elif lines and lines[0] == TRACED:
        lines = _own_words(lines)
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        code = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip() if frames else ""
        return f"{type(error).__name__}, which says nothing{f', raised by `{code}`' if code else ''}"
    first = PLACE_IN_GRAPH.sub("", lines[0])
    details = [line.strip() for line in lines[1:] if line.strip().lower().startswith(DETAILS)]
    if details:
        first = f"{first.rstrip('.')}: {', '.join(line[0].lower() + line[1:] for line in details)}"
    return f"{type(error).__name__}: {first}"


def flat(what: object) -> str:
    """All of a text, in one line."""
    return " ".join(str(what).split())


def place(error: BaseException, wanted: Callable[[str], bool]) -> str:
    """``file:line`` of the innermost frame in a file that is there and wanted; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(Path(error.filename))}:{error.lineno}"
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if Path(frame.filename).exists() and wanted(frame.filename)]
    return f"{shown(Path(frames[-1].filename))}:{frames[-1].lineno}" if frames else ""


def name_of(function: object) -> str:
    """The name of a function or class; of another object that can be called the name of its type."""
    return str(getattr(function, "__name__", type(function).__name__))


def shown(path: Path) -> str:
    """A path as a person at the present directory would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # it is elsewhere, or the present directory is gone
        return str(path)


def is_users(filename: str) -> bool:
    """Whether a file of code is of no library, nor of this package, by its path alone: it may be on another machine."""
    path = Path(filename)
    if filename.startswith("<") or STANDARD.search(filename) or LIBRARIES.intersection(path.parts):
        return False
    return not path.resolve().is_relative_to(PACKAGE)


def _said(error: BaseException) -> str:
    # The text of a KeyError is the repr of its key, in which the lines of wrappers are escaped.
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    found = KERAS.match(text) or LOADER.match(text)
    return found["said"] if found else str(error)


def _own_words(lines: list[str]) -> list[str]:
    """Of a text in which TensorFlow has put a traceback before what was said: that, without the type."""
    frames = [number for number, line in enumerate(lines) if line.startswith("    File ")]
    said = [line.strip() for line in lines[frames[-1] + 2 :] if line.strip()] if frames else lines[1:]
    return [said[0].partition(": ")[2] or said[0]] if said else lines


# Stacks of threads, in a few lines for people, and as `faulthandler` writes them. Those of all threads are in the worker's log.


MOST_LINES = 40
MOST_OF_LINE = 200
DUMPED = "Timeout ("  # how a dump begins that a timer has made
CRASHED = "Fatal Python error: "  # how the dump of a crash begins
# How it ends, since Python 3.10, and what a shell around the program and multiprocessing's tracker of resources add.
_SHELL = "Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception"
_TRACKER = r"resource_tracker|^  warnings\.warn"
_MODULES = re.compile(rf"^Extension modules: .*\(total: \d+\)(\n.*({_SHELL}|{_TRACKER}).*)*\s*\Z", re.MULTILINE)
_SAID_BEFORE = 5  # lines: C++ writes what an exception says before it aborts
_MACHINERY = '  File "<frozen importlib.'
_LINE = re.compile(r'  File "(?P<path>.*)", line (?P<number>\d+) in (?P<function>.*)')


@dataclass(frozen=True, slots=True)
class Line:
    path: str
    number: int
    function: str

    @property
    def is_users(self) -> bool:
        return is_users(self.path)

    def __str__(self) -> str:
        """As in ``train.py:31 in load``."""
        path = self.path
        for mark in LIBRARIES:
            path = path.rpartition(f"/{mark}/")[2]
        if path == self.path:
            path = STANDARD.split(path)[-1] if STANDARD.search(path) else shown(Path(path))
        return f"{path}:{self.number} in {self.function}"[-MOST_OF_LINE:]


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread, the innermost call first."""

    lines: tuple[Line, ...] = ()

    @property
    def where(self) -> str:
        """The innermost line of the user's own; without one, of any library that is not Python's own."""
        users = [line for line in self.lines if line.is_users]
        others = [line for line in self.lines if not STANDARD.search(line.path) or "-packages/" in line.path]
        return str(next(iter((*users, *others, *self.lines)), ""))


def describe(stack: Stack) -> list[str]:
    """The stack in at most `MOST_LINES` lines: the user's, then the rest."""
    lines = [str(line) for line in stack.lines if line.is_users]
    rest = [str(line) for line in stack.lines if not line.is_users]
    lines += ["called from there, innermost first:" if lines else "innermost first:", *rest] if rest else []
    return lines[:MOST_LINES]


def parse(text: str) -> list[Stack]:
    """The stacks of the last dump of `faulthandler` in a text, the main thread's first.

    Lines that others have printed in between are passed over. Empty if there is no dump.
    """
    stacks: list[Stack] = []
    if (begin := text.rfind(DUMPED)) == -1:
        return stacks
    for line in text[begin:].splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")) and "(most recent call first)" in line:
            stacks.append(Stack())
        elif stacks and (found := _LINE.fullmatch(line)):
            at = Line(found["path"], int(found["number"]), found["function"])
            stacks[-1] = Stack((*stacks[-1].lines, at))
    return stacks[::-1]  # CPython lists the newest thread first


def last_words(text: str) -> list[str]:
    """The crash with which a log ends, as `faulthandler` has written it: the lines just before, then the stacks, innermost call
    first. The frames of Python's import system and the list of compiled modules are left out, as they hide the rest.
    Empty if the log does not end with a crash.
    """
    begin = text.rfind(CRASHED)
    end = _MODULES.search(text, begin) if begin != -1 else None
    if end is None:
        return []
    stacks = [line for line in text[begin : end.start()].splitlines() if line and _MACHINERY not in line]
    return [*text[:begin].splitlines()[-_SAID_BEFORE:], *stacks]


# The exception that has ended a process, read from what the process has printed.


# What is printed after the exception that ends a process, by functions for its exit; an earlier one was caught.
LINES_AFTER = 20
_BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<number>\d+)(?:, in (?P<function>.*))?')
_ERROR = re.compile(r"(?:[\w.]+\.)?(?P<type>[A-Z]\w*)(?:: (?P<said>.*))?")
# How torch begins each line of a traceback in a process that has called `init_process_group`.
_OF_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)


def without_ranks(output: str) -> str:
    """What was printed, with tracebacks as Python itself prints them."""
    return _OF_RANK.sub("", output)


def last_exception(output: str) -> str:
    """``FILE:LINE: TYPE: WHAT IT SAYS; WHAT HELPS`` of the last traceback, as of `elasticdl.common.reason.reason`; empty if there is none."""
    lines = without_ranks(output).splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.fullmatch(line)]
    if not frames:
        return ""
    end = next((number for number in range(frames[-1] + 1, len(lines)) if lines[number][:1].strip()), None)
    error = _ERROR.fullmatch(lines[end]) if end is not None and len(lines) - end <= LINES_AFTER else None
    if error is None:
        return ""
    begin = max((number for number in range(frames[-1]) if lines[number] == _BEGINS), default=0)
    users = [line for number in frames if number >= begin and (line := _line(lines[number])).is_users]
    place = f"{str(users[-1]).partition(' in ')[0]}: " if users else ""
    said = f"{error['type']}: {error['said']}" if error["said"] else str(error["type"])
    return place + with_help(said)


def last_line(output: str) -> str:
    """The last that was said; empty if nothing was."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def _line(text: str) -> Line:
    found = _FRAME.fullmatch(text)
    assert found is not None, "it is a frame"
    return Line(found["path"], int(found["number"]), found["function"] or "")
