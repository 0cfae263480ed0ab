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
    except ValueError:
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
