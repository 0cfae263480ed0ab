"""The user's code when it raises: whose fault it was, and the part of the traceback that concerns the user."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.reason import PACKAGE, one_line, place

_LAYERS = "Keras's own preprocessing layers, as in model_zoo/census/wide_deep_keras.py"
_RECORDS = "TFRecord files, which are read by index"
_LIBRARY = "elasticdl.elastic in a script under `elasticdl run` (docs/library.md)"

# By the beginning of the module's name, the longest first.
MISSING = {
    "elasticdl.python.elasticdl.layers": ("the Embedding layer on ElasticDL's parameter servers", "keras.layers.Embedding"),
    "elasticdl.python.elasticdl.feature_column": ("feature columns on ElasticDL's parameter servers", _LAYERS),
    "elasticdl.python.data.reader.recordio_reader": ("ElasticDL's reader of RecordIO files", _RECORDS),
    "elasticdl.python": ("a part of ElasticDL", "what docs/data.md lists as there"),
    "elasticdl_preprocessing": ("ElasticDL's package of preprocessing layers", _LAYERS),
    "elasticai_api.io": ("ElasticDL's reader of RecordIO files", _RECORDS),
    "elasticai_api": ("ElasticDL's API for scripts", _LIBRARY),
    "elasticdl_client": ("ElasticDL's client", "the command `elasticdl`"),
    "recordio": ("the RecordIO format", _RECORDS),
    "deepctr": ("DeepCTR, a package of layers for Keras 2", "layers of Keras 3"),
}  # fmt: skip


def explain(error: BaseException) -> str:
    """One line for an import that failed since the module is ElasticDL's or of its surroundings; else empty."""
    name = error.name if isinstance(error, ImportError) else None
    if name is None:
        return ""
    known = next((prefix for prefix in MISSING if name == prefix or name.startswith(f"{prefix}.")), None)
    if known is None:
        return ""
    what, instead = MISSING[known]
    return f"imports {name}: {what}, not supported here: use {instead}"


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


def _first(tb: TracebackType | None, wanted: Callable[[str], bool]) -> TracebackType | None:
    while tb is not None and not wanted(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb
