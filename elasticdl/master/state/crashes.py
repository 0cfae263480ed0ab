"""How many workers have crashed, and when the job can't go on for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

CRASHES_AT_START = 3
CRASHES_IN_TRAINING = 10
# So many steps without a crash clear the count.
STEPS_TO_FORGET_CRASHES = 100


@dataclass(frozen=True, slots=True)
class Crashes:
    at_start: int = 0  # in a row, by workers that had reached no world
    in_training: int = 0
    steps_since: int = 0
    most: int = 0  # the job makes do with so many workers, as more could not start; 0: with as many as are wanted
    given_up: str = ""  # why, for people

    @property
    def in_a_row(self) -> int:
        return max(self.at_start, self.in_training)

    def and_one(self, *, in_training: bool) -> Crashes:
        if in_training:
            return replace(self, in_training=self.in_training + 1, steps_since=0)
        return replace(self, at_start=self.at_start + 1, steps_since=0)

    def after_steps(self, steps: int) -> Crashes:
        since = self.steps_since + steps
        in_training = 0 if since >= STEPS_TO_FORGET_CRASHES else self.in_training
        return replace(self, steps_since=since, in_training=in_training)

    def after_world(self) -> Crashes:
        """A worker has got through its start, so others can."""
        return replace(self, at_start=0)

    def too_many(self, *, world_runs: bool) -> str:
        """Why it makes no sense to go on, if so."""
        if self.at_start >= CRASHES_AT_START and not world_runs:
            return f"{self.at_start} workers in a row failed at the start"
        if self.in_training >= CRASHES_IN_TRAINING:
            return f"{self.in_training} workers crashed in training"
        return ""
