"""Text that jobs write: read from files that grow, a whole line at a time, and merged by time."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

POLL = 0.2
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")


class Tail:
    """What comes to a file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Whole lines that have come since the last look, without their ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                fresh = file.read()
        except FileNotFoundError:
            return []
        self._position += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> str:
        """The unfinished last line."""
        return self._rest.decode(errors="replace")


def followed(look: Callable[[], Iterable[str]], may_grow: Callable[[], bool]) -> Iterator[str]:
    """All that ``look`` finds, until nothing more can come."""
    more = True
    while more:
        more = may_grow()  # asked first: what came meanwhile is read once more
        yield from look()
        if more:
            time.sleep(POLL)


def prefix(writer: str, only: str | None) -> str:
    return "" if only else f"{writer:9} | "


def by_writer(names: Iterable[str]) -> list[str]:
    """The master, then the workers by number."""
    return sorted(names, key=lambda name: (name != "master", len(name), name))


def merged(written: Mapping[str, list[str]]) -> list[str]:
    """Lines by their prefix, in the order of time as far as they tell it."""
    streams = (_dated(start, lines) for start, lines in written.items())
    return [line for _, line in heapq.merge(*streams, key=lambda item: item[0])]


def _dated(start: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each line with the time that it, or a line before it, begins with."""
    moment = ""
    for line in lines:
        found = _TIMESTAMP.match(line)
        moment = found[0].replace("T", " ").replace(",", ".") if found else moment
        yield moment, start + line
