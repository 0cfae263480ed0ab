"""A small disk of its own, which can be filled and emptied."""

from __future__ import annotations

import subprocess
from pathlib import Path

BYTES = 1 << 20
MOUNT_SECONDS = 20.0


class Disk:
    """To be made in a mount namespace of one's own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={BYTES},mode=0700", "tmpfs", str(folder))
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """To the last byte."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        _run("umount", str(self.folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=MOUNT_SECONDS, stdin=subprocess.DEVNULL)
