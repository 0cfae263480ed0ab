"""Processes that a worker's script starts, and that take no part in the job: those that load its data, above all.

Python's ``spawn`` and ``forkserver`` import the script anew in each of them, and run whatever stands at its top level.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from elasticdl.common.credentials import CONNECTED, MASTER
from elasticdl.common.errors import UserError

GUARD = 'if __name__ == "__main__":'


def imports_the_script_anew() -> bool:
    """Whether multiprocessing has started this process, which has come no further than to import what it needs."""
    process = multiprocessing.current_process()
    # `parent_process` is set later; and a fork server, which may import the script once for all, is a MainProcess.
    return process.name != "MainProcess" or bool(getattr(process, "_inheriting", False))


def belongs_to_a_worker(environ: Mapping[str, str]) -> bool:
    """Whether the process that started this one, or one before, is the worker: it has set the variable."""
    return MASTER in environ and environ.get(CONNECTED) == environ[MASTER]


def require_guard(processes: int) -> None:
    """Before processes are started that import the script.

    Raises:
        UserError: the script trains at its top level, where each of them would train, too.
    """
    main = vars(sys.modules["__main__"])
    frame = _top_level_of(main)
    path = main.get("__file__")
    if frame is None or path is None or not Path(path).is_file():  # `python -c`: nothing can be imported anew
        return
    if (getattr(main.get("__spec__"), "name", None) or "").rpartition(".")[2] == "__main__":  # a package's: it is not
        return
    # Whatever the condition is: where it does not tell children apart, they refuse to train themselves.
    ifs = [node for node in ast.walk(ast.parse(Path(path).read_bytes())) if isinstance(node, ast.If)]
    if not any(node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno) for node in ifs):
        raise UserError(
            f"{path}:{frame.f_lineno}: with num_workers={processes} each process that loads data imports this script and "
            f"would train as well: put what the script does below `{GUARD}`"
        )


def _top_level_of(main: Mapping[str, object]) -> FrameType | None:
    """Where the main script is at present."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is main):
        frame = frame.f_back
    return frame
