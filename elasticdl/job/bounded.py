"""Lists, curves and histograms that stay small however long a job is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from elasticdl.job.history import Point

T = TypeVar("T")
MOST_POINTS = 1500


class CappedList(Generic[T]):
    """Items in order. When there are more than twice ``most``, those of most ``worth`` stay; without ``worth`` every second."""

    def __init__(self, most: int, worth: Callable[[T], float] | None = None) -> None:
        self._most = most
        self._worth = worth
        self._items: list[T] = []
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @property
    def dropped(self) -> int:
        return self.count - len(self._items)

    @property
    def last(self) -> T | None:
        return self._items[-1] if self._items else None

    def add(self, item: T) -> None:
        self._items.append(item)
        self.count += 1
        if len(self._items) <= 2 * self._most:
            return
        if self._worth is None:
            self._items = self._items[::2]  # the number is odd: with the first and the last
        else:
            worth = list(map(self._worth, self._items))
            kept = sorted(range(len(worth)), key=lambda place: (worth[place], place))[-self._most :]
            self._items = [self._items[place] for place in sorted({*kept, len(worth) - 1})]

    def amend(self, last: T) -> None:
        """Replace the last item."""
        self._items[-1] = last

    def change_each(self, change: Callable[[T], T]) -> None:
        """Replace each item, the newest first."""
        self._items = [change(item) for item in reversed(self._items)][::-1]


class Curve:
    """Points of a curve. When there are too many, each two are joined, so the whole curve has one resolution."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._each = 1  # of the points that were added, those that make one
        self._in_last = 0

    def add(self, point: Point) -> None:
        last = self._points[-1] if self._points else None
        if last is not None and self._in_last < self._each and last.workers == point.workers:
            self._points[-1] = last + point
            self._in_last += 1
        else:
            self._points.append(point)
            self._in_last = 1
        if len(self._points) >= 2 * MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [first + second for first, second in pairs]
            self._in_last += self._each
            self._each *= 2

    def result(self) -> tuple[Point, ...]:
        return tuple(self._points)


class Histogram:
    """Counts of values by the lowest of ``bounds`` that is not below them, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: of larger ones
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
