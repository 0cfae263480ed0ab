"""Whether a process of this machine is still the one that it was."""

from __future__ import annotations

import os
from pathlib import Path

_START = 19  # of the fields after the name, which ends with the last bracket: see proc(5), field 22


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's process, but a process
    return True


def start_of(pid: int) -> int:
    """When a process was started, in the kernel's ticks since the machine was; 0 if that can't be known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START])
    except (OSError, IndexError, ValueError):
        return 0
