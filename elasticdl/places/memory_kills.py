"""Whether the kernel ended a worker because memory was short: its exit code does not say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """Those in this process's control group: a container's, a batch job's or a session's. Its workers are in it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._count()

    def happened(self) -> bool:
        """Since that was asked last, which it is at each end: a kill is that of the next end that is seen."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        """0 where the kernel does not say."""
        for file in self._files():
            try:
                found = _KILLS.search(file.read_text())
            except OSError:
                continue
            return int(found[1]) if found else 0
        return 0

    def _files(self) -> Iterator[Path]:
        try:
            groups = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return
        mounted = self._root / "sys/fs/cgroup"
        for line in groups:
            _, controllers, group = line.split(":", 2)
            # In a container the group's own folder is what is mounted, under whatever path the host has it. The topmost group of a
            # machine has no such file.
            if not controllers:  # of the second version
                yield from (mounted / group.strip("/") / "memory.events", mounted / "memory.events")
            elif "memory" in controllers.split(","):
                folder = mounted / "memory"
                yield from (folder / group.strip("/") / "memory.oom_control", folder / "memory.oom_control")
