"""Pods that are over, and nobody needs any more: the newest are kept for their logs."""

from __future__ import annotations

KEPT = 3


class Leftovers:
    """Reads no clock: whoever asks says what time it is. ``seconds``: so long each is kept, as all are at the end of a job."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._over: dict[int, float] = {}  # since when, in that order

    def __contains__(self, number: int) -> bool:
        return number in self._over

    def add(self, number: int, now: float) -> None:
        """Its pod is over, and that was reported."""
        self._over.setdefault(number, now)

    def take(self, now: float) -> list[int]:
        """The numbers of pods that are to be removed; they are not named again."""
        older = list(self._over)[:-KEPT]
        due = [number for number in older if now - self._over[number] >= self._seconds]
        for number in due:
            del self._over[number]
        return due

    def next(self, now: float) -> float | None:
        """Seconds until there are some to be taken; None if there are none."""
        older = list(self._over.values())[:-KEPT]
        return max(0.0, older[0] + self._seconds - now) if older else None
