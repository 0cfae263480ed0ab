"""The user's code when it raises: where it was, and the part of the traceback that concerns the user."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from elasticdl.common.errors import ElasticDLError, UserError

PACKAGE = Path(__file__).resolve().parents[1]
TRACED = "in user code:"  # so TensorFlow begins what was raised in a function that it was tracing
KERAS = re.compile(  # how Keras wraps what a layer raised
    r"Exception encountered when calling [^\n]*\n\n(?:\x1b\[1m)?(?P<said>.*?)(?:\x1b\[0m)?\n\nArguments received by ",
    re.DOTALL,
)
PLACE_IN_GRAPH = re.compile(r"^\{\{.*?\}\} ?| ?\[Op:\w+\].*$")
DETAILS = ("expected:", "received:")  # what is said of these on further lines is kept


def shown(path: Path) -> str:
    """A path as a person at the present directory would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def one_line(error: BaseException) -> str:
    """Type and first line of an exception, with what it says on further lines of what was expected and received."""
    lines = _said(error).strip().splitlines()
    if lines and lines[0] == TRACED:
        lines = _own_words(lines)
    if not lines:
        return type(error).__name__
    first = PLACE_IN_GRAPH.sub("", lines[0])
    details = [line.strip() for line in lines[1:] if line.strip().lower().startswith(DETAILS)]
    if details:
        first = f"{first.rstrip('.')}: {', '.join(line[0].lower() + line[1:] for line in details)}"
    return f"{type(error).__name__}: {first}"


def place(error: BaseException, folder: Path) -> str:
    """``file:line`` of the innermost frame below the folder; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(Path(error.filename))}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _below(frame.filename, folder)]
    return f"{shown(Path(frames[-1].filename))}:{frames[-1].lineno}" if frames else ""


def users_traceback(error: BaseException, folder: Path) -> str:
    """The traceback from the first frame below the folder on; without one, from the first outside this package."""
    start = _first(error.__traceback__, lambda name: _below(name, folder)) or _first(
        error.__traceback__, lambda name: not _below(name, PACKAGE)
    )
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))


@contextlib.contextmanager
def blame(what: str, folder: Path, otherwise: str = "") -> Iterator[None]:
    """Turn whatever the user's code raises within into one line that says where.

    ``otherwise``: the place if none below the folder was involved.

    Raises:
        UserError: something was raised.
    """
    try:
        yield
    except ElasticDLError:
        raise
    except (Exception, SystemExit) as error:
        where = place(error, folder) or otherwise
        raise UserError(f"{where + ': ' if where else ''}{what} raised {one_line(error)}") from error


def _said(error: BaseException) -> str:
    # The text of a KeyError is the repr of its key, in which Keras's lines are escaped.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    found = KERAS.match(str(text))
    return found["said"] if found else str(error)


def _own_words(lines: list[str]) -> list[str]:
    """Of a text in which TensorFlow has put a traceback before what was said: that, without the type."""
    frames = [number for number, line in enumerate(lines) if line.startswith("    File ")]
    said = [line.strip() for line in lines[frames[-1] + 2 :] if line.strip()] if frames else lines[1:]
    return [said[0].partition(": ")[2] or said[0]] if said else lines


def _below(filename: str, folder: Path) -> bool:
    return Path(filename).resolve().is_relative_to(folder.resolve())


def _first(tb: TracebackType | None, wanted: object) -> TracebackType | None:
    assert callable(wanted)
    while tb is not None and not wanted(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb
