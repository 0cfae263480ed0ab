"""How often the kernel has killed a process of this control group, a container or a job of a batch system, for its limit of memory."""

from __future__ import annotations

import re
from pathlib import Path

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def kills(root: Path = Path("/")) -> int:
    """0 where it can't be told."""
    for file in _files(root):
        try:
            return int(found[1]) if (found := _KILLS.search(file.read_text())) else 0
        except OSError:
            continue
    return 0


def _files(root: Path) -> list[Path]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mounted, files = root / "sys/fs/cgroup", []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        # In a container the group's own folder is what is mounted, under whatever path the host has it.
        if not controllers:  # of the second version
            files += [mounted / group.strip("/") / "memory.events", mounted / "memory.events"]
        elif "memory" in controllers.split(","):
            folder = mounted / "memory"
            files += [folder / group.strip("/") / "memory.oom_control", folder / "memory.oom_control"]
    return files
