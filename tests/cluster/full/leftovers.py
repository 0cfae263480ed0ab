"""Remove what a node leaves when its processes are gone: `python leftovers.py CGROUP FOLDER`; and what it begins with.

Imports only the standard library, so that it starts quickly without `site`.
"""

import os
import shutil
import sys
import time
from pathlib import Path

HIERARCHIES = Path("/sys/fs/cgroup")
_WITHIN_S = 10.0
_POLL_S = 0.02


def make_groups(name: str) -> None:
    """A control group of this name in every hierarchy, to put others into."""
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if hierarchy.name == "cpuset":  # without processors and memory nothing can be put into it
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((hierarchy / file).read_text())


def remove_groups(name: str) -> None:
    """Remove what `make_groups` has made, with all below, as soon as the last process in it has been buried."""
    deadline = time.monotonic() + _WITHIN_S
    left = [hierarchy / name for hierarchy in _hierarchies()]
    while left := [group for group in left if not _removed(group)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"control groups are still in use: {', '.join(map(str, left))}")
        time.sleep(_POLL_S)


def _hierarchies() -> list[Path]:
    return [path for path in HIERARCHIES.iterdir() if path.is_dir() and not path.is_symlink()]


def _removed(group: Path) -> bool:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:  # its processes are dead and not yet buried
            return False
    return True


if __name__ == "__main__":
    remove_groups(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)  # the cluster may be removing it, too
