"""The user's code when it raises: whose fault it was, and the part of the traceback that concerns the user."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.reason import PACKAGE, one_line, place
from elasticdl.worker.of_elasticdl import explain


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
        where = place(error, lambda name: _below(name, folder)) or otherwise
        said = explain(error) or f"{what} raised {one_line(error)}"
        raise UserError(f"{where + ': ' if where else ''}{said}") from error


def _below(filename: str, folder: Path) -> bool:
    return Path(filename).resolve().is_relative_to(folder.resolve())


def _first(tb: TracebackType | None, wanted: object) -> TracebackType | None:
    assert callable(wanted)
    while tb is not None and not wanted(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb
