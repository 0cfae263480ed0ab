"""Text that comes from threads, and text that is there already: see `elasticdl.cli.handle.Growing`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Text:
    """What is there once and for all."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def may_grow(self) -> bool:
        return False

    def last_words(self) -> list[str]:
        return []


class Stream:
    """What a thread writes, until its function returns. ``stop`` ends the function soon if it heeds ``stopped``."""

    def __init__(self, name: str, write: Callable[[Stream], None]) -> None:
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

    def last_words(self) -> list[str]:
        return []

    def stop(self, timeout: float) -> None:
        self.stopped.set()
        self._thread.join(timeout)
