"""What the time of this worker's last steps went into."""

from __future__ import annotations

import statistics
from enum import StrEnum

from elasticdl.job.messages import StepTimes

# Steps whose median is told.
WINDOW = 32


class Activity(StrEnum):
    """What a training function is at."""

    DATA = "data"  # it loads the samples of a micro-batch
    COMPUTE = "compute"  # forward and backward passes
    WAIT = "wait"  # a collective, which may last as long as another member takes
    UPDATE = "update"  # the optimizer, and what the script does until it loads again
    END = "end"  # its training is over, and it waits for that of the others
    ALIVE = "alive"  # something was done, and the activity goes on


class StepClock:
    """The training thread passes the time in, in order, and says when an activity begins. `last_steps` is for any thread."""

    def __init__(self) -> None:
        self._steps: tuple[tuple[float, ...], ...] = ()  # as the fields of `StepTimes`; replaced as a whole
        self._spent = dict.fromkeys(Activity, 0.0)
        self._activity = Activity.UPDATE
        self._since: float | None = None  # None: what is done now is part of no step
        self.samples = 0  # of this worker, in the present step

    def forget(self) -> None:
        """The world is left: its steps say nothing about those of another."""
        self._steps = ()
        self._since = None

    def resume(self, now: float) -> None:
        """Steps are made from here on; what was done since the last one is part of none."""
        self._spent = dict.fromkeys(Activity, 0.0)
        self._activity, self._since = Activity.UPDATE, now

    def turn_to(self, activity: Activity, now: float) -> None:
        since = self._since
        if activity is Activity.ALIVE or since is None:
            return
        self._spent[self._activity] += now - since
        self._activity, self._since = activity, now

    def passes_ended(self, device_seconds: float) -> None:
        """The device's passes ended so long after the batch was begun: till then the host did not wait for others."""
        spent = self._spent
        hidden = device_seconds - spent[Activity.DATA] - spent[Activity.COMPUTE]
        hidden = min(max(0.0, hidden), spent[Activity.WAIT])
        spent[Activity.COMPUTE] += hidden
        spent[Activity.WAIT] -= hidden

    def step_made(self, now: float) -> None:
        if self._since is None:
            self.resume(now)
            return
        self.turn_to(Activity.UPDATE, now)
        phases = (Activity.DATA, Activity.COMPUTE, Activity.WAIT, Activity.UPDATE)
        step = (*(self._spent[phase] for phase in phases), float(self.samples))
        self._steps = (*self._steps[1 - WINDOW :], step)
        self.resume(now)

    def last_steps(self) -> StepTimes | None:
        """Medians over the last steps of this world; None before the first."""
        steps = self._steps
        return StepTimes(len(steps), *map(statistics.median, zip(*steps, strict=True))) if steps else None
