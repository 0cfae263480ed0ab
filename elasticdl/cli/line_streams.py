"""Text that jobs write: read from files that grow or by threads, a whole line at a time, and merged by time."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

POLL = 0.2
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")


class LineStream(Protocol):
    def lines(self) -> list[str]:
        """Whole lines that have come since the last look, without their ends."""

    def may_grow(self) -> bool: ...

    def rest(self) -> list[str]:
        """Unfinished last lines, once nothing more can come."""


class FixedLines:
    """What is there once and for all."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def may_grow(self) -> bool:
        return False

    def rest(self) -> list[str]:
        return []


class FileLines:
    """The lines of a file that need not be there yet; ``grows`` says whether more may come."""

    def __init__(self, path: Path, grows: Callable[[], bool] = lambda: False) -> None:
        self._path = path
        self._grows = grows
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                fresh = file.read()
        except FileNotFoundError:
            return []
        self._position += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def may_grow(self) -> bool:
        return self._grows()

    def rest(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


class ThreadLines:
    """What a thread writes, until its function returns. The function has to return soon after ``stopped`` is set."""

    def __init__(self, name: str, write: Callable[[ThreadLines], None]) -> None:
        self.stopped = threading.Event()
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=write, args=(self,), name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, line: str) -> None:
        self._inbox.put(line)

    def lines(self) -> list[str]:
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def may_grow(self) -> bool:
        return self._thread.is_alive()

    def rest(self) -> list[str]:
        return []

    def stop(self, timeout: float) -> None:
        self.stopped.set()
        self._thread.join(timeout)


def followed(stream: LineStream) -> Iterator[str]:
    """All lines, until nothing more can come; one that is unfinished then is left out."""
    more = True
    while more:
        more = stream.may_grow()  # asked first: what came meanwhile is read once more
        yield from stream.lines()
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
