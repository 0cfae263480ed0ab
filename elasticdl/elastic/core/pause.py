"""Measuring the pause: where the time of a change of workers goes, on one survivor."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds without training, split by what they went into.

    ``first_step`` is by what the first step took longer than an ordinary one before: with more workers for the same
    global batch it may well be shorter, and is then zero.
    """

    world_version: int
    kind: str  # grow, shrink or failure
    notice: float
    drain: float
    rendezvous: float
    init: float
    sync: float
    first_step: float
    steps_torn: int

    @property
    def total(self) -> float:
        return self.notice + self.drain + self.rendezvous + self.init + self.sync + self.first_step


PHASES = tuple(field.name for field in fields(Pause) if field.type == "float")


class PauseClock:
    """Marks the way from the last step of one world to the first of the next.

    The caller passes the time in, in order: ``step_done``* → ``left`` → ``stopped`` → ``joined`` → ``started`` →
    ``synced`` → ``step_done``. A second failure on the way starts again at ``stopped`` with the same beginning, so
    that the pause counts the whole time.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=31)
        self._last_step: float | None = None
        self._marks: dict[str, float] = {}
        self._broken = False
        self._torn = 0

    def left(self, now: float, *, broken: bool, torn: bool) -> None:
        self._marks.setdefault("left", now)
        self._marks.pop("resumed", None)
        self._broken = self._broken or broken
        self._torn += torn

    def mark(self, name: str, now: float) -> None:
        """``stopped``, ``joined``, ``started`` or ``synced``; a later mark of the same name replaces the earlier."""
        self._marks[name] = now

    def resume(self, now: float) -> None:
        """Training goes on after something that is neither a step nor a pause (an evaluation)."""
        if self._marks:
            self._marks["resumed"] = now
        elif self._last_step is not None:
            self._last_step = now

    def step_done(self, now: float, *, world_version: int, grew: bool) -> Pause | None:
        """Returns the pause that this step ended, if one was under way on a survivor."""
        before, self._last_step = self._last_step, now
        marks, self._marks = self._marks, {}
        if before is None or "left" not in marks or "synced" not in marks:
            if before is not None and not marks:
                self._durations.append(now - before)
            return None
        ordinary = statistics.median(self._durations) if self._durations else 0.0
        broken, torn = self._broken, self._torn
        self._broken, self._torn = False, 0
        return Pause(
            world_version=world_version,
            kind="failure" if broken else "grow" if grew else "shrink",
            notice=marks["left"] - before,
            drain=marks["stopped"] - marks["left"],
            rendezvous=marks["joined"] - marks["stopped"],
            init=marks["started"] - marks["joined"],
            sync=marks["synced"] - marks["started"],
            first_step=max(0.0, now - marks.get("resumed", marks["synced"]) - ordinary),
            steps_torn=torn,
        )
