"""Virtual time: a queue of calls, each at a moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_Call = tuple[float, int, Callable[..., Any], tuple[Any, ...]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[_Call] = []
        self._number = 0  # of the latest call: those of one moment are made in the order in which they were asked for

    def after(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._calls, (self.now + seconds, self._number, call, arguments))

    def advance(self) -> bool:
        """Make the next call; False if there is none."""
        if not self._calls:
            return False
        self.now, _, call, arguments = heapq.heappop(self._calls)
        call(*arguments)
        return True
