"""What a node sees of the machine's files, set up in its own mount namespace.

The kubelet and containerd have places that no option moves, and write to the kernel's settings; here both are the
node's own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.full.leftovers import HIERARCHIES

_WITHIN_S = 20.0
# What the kubelet wants the kernel to be set to.
_KERNEL = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}


def mount_own(folder: Path, logs: Path) -> None:
    """``logs``: the folder that pods' logs are written to, as they would be to /var/log/pods."""
    _mount("-t", "proc", "proc", "/proc")
    for name, value in _KERNEL.items():
        file = folder / "kernel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        _mount("--bind", str(file), f"/proc/sys/{name}")
    for place in ("/run", "/var/log"):
        _mount("-t", "tmpfs", "tmpfs", place)
    for name in ("pods", "containers"):
        Path("/var/log", name).mkdir()
    _mount("--bind", str(logs), "/var/log/pods")
    _cover("/var/lib", folder / "var-lib")
    _mount_sysfs(folder)


def _cover(place: str, folder: Path) -> None:
    """What is there is seen as before, and what is written there goes below ``folder``."""
    for name in ("upper", "work"):
        (folder / name).mkdir(parents=True)
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir={place},upperdir={folder}/upper,workdir={folder}/work", place)


def _mount_sysfs(folder: Path) -> None:
    """Of this network namespace, with the control groups where they were."""
    aside = folder / "cgroup"
    aside.mkdir()
    _mount("--rbind", str(HIERARCHIES), str(aside))
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--rbind", str(aside), str(HIERARCHIES))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], timeout=_WITHIN_S, check=True)
