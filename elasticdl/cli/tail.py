"""Reading files that grow, a whole line at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL = 0.2


class Tail:
    """The lines that have come to a file since the last look; the file need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Whole new lines, without their ends."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                fresh = file.read()
        except FileNotFoundError:
            return []
        self._position += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def last_words(self) -> list[str]:
        """An unfinished last line, once nothing more can come."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def looks(more: Callable[[], bool]) -> Iterator[None]:
    """Yields for each look at the files: again and again while there may be more, and once after that."""
    while more():
        yield
        time.sleep(POLL)
    yield
