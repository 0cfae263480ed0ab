"""The GPUs of a node: which pod has which."""

from __future__ import annotations

import threading


class Devices:
    """Hands out ids from 0; safe for many threads."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._changed = threading.Condition()

    def take(self, count: int, timeout: float) -> list[int] | None:
        """The lowest free ids, or None if fewer than ``count`` are free for all of ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count, timeout):
                return None
            taken = sorted(self._free)[:count]
            self._free.difference_update(taken)
            return taken

    def give_back(self, ids: list[int]) -> None:
        with self._changed:
            self._free.update(ids)
            self._changed.notify_all()
