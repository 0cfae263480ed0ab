"""Where a process of this machine stands that can't tell it by itself: what it has left, and the state the kernel has it in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from elasticdl.master.state.events import StacksFound

MOST_BYTES = 1 << 18
# In these a process can't run, whatever Python does in it.
_HELD = {
    psutil.STATUS_STOPPED: "does not run: it is stopped (state T)",
    psutil.STATUS_TRACING_STOP: "does not run: a debugger holds it (state t)",
    psutil.STATUS_DISK_SLEEP: "does not run: the kernel waits for a disk or a network file system (state D)",
    psutil.STATUS_ZOMBIE: "does not run: it has ended (state Z)",
}
RUNS = "its process runs"


def look_at(worker_id: int, pid: int, dump: Path, log: Path | None = None) -> StacksFound:
    """``pid`` leads the worker's processes. ``log``: takes what is found, too."""
    text = _read(dump)
    pids = _with_children(pid)
    # The worker has the file open as long as it has a session: what it has started may have ended, or be stopped, without harm.
    worker = next((each for each in pids if _has_open(each, os.path.realpath(dump))), None)
    state = _state(pids if worker is None else [worker])
    if not text and not state:
        state = RUNS
    if text and log is not None:
        with contextlib.suppress(OSError), log.open("a") as lines:  # on a full disk it is told all the same
            lines.write(f"elasticdl: worker {worker_id} does not answer; its stacks:\n{text}\n")
    return StacksFound(worker_id, text, state, has_session=state == RUNS and worker is not None)


def _read(dump: Path) -> str:
    try:
        with dump.open("rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _with_children(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def _has_open(pid: int, path: str) -> bool:
    # By the names of the links: to look at the files themselves may hang, as at those of a server that is gone.
    with contextlib.suppress(OSError):
        return any(os.readlink(link) == path for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _state(pids: Sequence[int]) -> str:
    """Why the first of these can't run that can't; empty if all can."""
    for pid in pids:
        try:
            status = psutil.Process(pid).status()
        except psutil.Error:
            continue
        if words := _HELD.get(status):
            return words
    return ""
