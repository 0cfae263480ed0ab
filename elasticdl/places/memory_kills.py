"""Whether the kernel ended a worker of this machine because memory was short: its exit code does not say so."""

from __future__ import annotations

import signal
from pathlib import Path

from elasticdl.master.state.events import ExitCause

OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


class MemoryKills:
    """Those in this process's control group (version 2), in which its workers are; nothing is said where there is none."""

    def __init__(self, own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> None:
        self._events = _events_of(own_group, groups)
        self._seen = self._count()

    def explain(self, code: int, cause: ExitCause, detail: str) -> tuple[ExitCause, str]:
        """The cause of an end, and what to say of it; called at each end, as a kill is that of the next that is seen."""
        before, self._seen = self._seen, self._count()
        if code == -signal.SIGKILL and self._seen > before:
            return ExitCause.OUT_OF_MEMORY, "the kernel has killed it, as memory was short"
        return cause, detail

    def _count(self) -> int:
        try:
            words = self._events.read_text().split() if self._events else []
        except OSError:
            return 0
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _events_of(own_group: Path, groups: Path) -> Path | None:
    """The file that counts them. The topmost group has none: what is killed there may be anybody's."""
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return None
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    file = groups / paths[0] / "memory.events" if paths else None
    return file if file and file.exists() else None
