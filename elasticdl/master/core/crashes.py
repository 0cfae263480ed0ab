"""Counts crashes: says how long a replacement has to wait, and when the job can't go on."""

from __future__ import annotations

from elasticdl.master.core.snapshot import CrashSnapshot

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
_DOUBLINGS = 16
CRASHES_AT_START = 3
CRASHES_IN_TRAINING = 10
# So many steps without a crash clear the count.
STEPS_TO_FORGET_CRASHES = 100


class Crashes:
    def __init__(self, past: CrashSnapshot) -> None:
        self._at_start = past.at_start
        self._in_training = past.in_training
        self._steps_since = past.steps_since
        self._held_until: list[float] = []  # one for each replacement that has to wait

    def snapshot(self) -> CrashSnapshot:
        """Without the delays of replacements: time has passed when it is used."""
        return CrashSnapshot(self._at_start, self._in_training, self._steps_since)

    def trained(self, steps: int) -> None:
        self._steps_since += steps
        if self._steps_since >= STEPS_TO_FORGET_CRASHES:
            self._in_training = 0

    def reached_world(self) -> None:
        """Workers do get through their start."""
        self._at_start = 0

    def held(self, now: float) -> int:
        """How many replacements have to wait at this time."""
        self._held_until = [time for time in self._held_until if time > now]
        return len(self._held_until)

    @property
    def holding(self) -> bool:
        """Whether a replacement had to wait when `held` was last asked."""
        return bool(self._held_until)

    def count(self, *, in_training: bool, now: float) -> None:
        """One more; its replacement waits the longer, the more there were in a row."""
        if in_training:
            self._in_training += 1
        else:
            self._at_start += 1
        self._steps_since = 0
        in_a_row = min(max(self._at_start, self._in_training), _DOUBLINGS)
        self._held_until.append(now + min(LONGEST_DELAY, FIRST_DELAY * 2 ** (in_a_row - 1)))

    def too_many(self, *, world_runs: bool) -> str:
        """Why it makes no sense to go on, if so."""
        if self._at_start >= CRASHES_AT_START and not world_runs:
            return f"{self._at_start} workers in a row failed at the start"
        if self._in_training >= CRASHES_IN_TRAINING:
            return f"{self._in_training} workers crashed in training"
        return ""
