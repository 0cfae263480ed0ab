"""A file that others write to, line by line."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path


class Tail:
    """What comes to a file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0  # which another file may be given once this one is gone
        self._position = 0  # up to which it has been read
        self._rest = b""
        self.begun = 0  # how often it was read from its beginning: somebody may have emptied or replaced it

    def lines(self, most: int = -1) -> list[str]:
        """Whole lines that have come since the last look, without their ends; of ``most`` bytes and what ends their last."""
        return [line for _, line in self.placed_lines(most)]

    def placed_lines(self, most: int = -1) -> list[tuple[int, str]]:
        """The same, with where each begins."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._position:
                    self._inode, self._position, self._rest = about.st_ino, 0, b""
                    self.begun += 1
                file.seek(self._position)
                fresh = file.read(most) + file.readline()
        except FileNotFoundError:
            return []
        place = self._position - len(self._rest)
        self._position += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        places = accumulate((len(line) + 1 for line in whole), initial=place)
        return [(start, line.decode(errors="replace")) for start, line in zip(places, whole, strict=False)]

    def rest(self) -> str:
        """The unfinished last line."""
        return self._rest.decode(errors="replace")
