"""What a worker tells its master unasked: heartbeats, steps in bunches, pauses.

Beside what is told: the clocks by which steps and their parts are measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from enum import StrEnum
from itertools import takewhile

from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import World
from elasticdl.job import messages as m
from elasticdl.job.messages import StepTimes

# What the time of this worker's last steps went into.

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


# As many as are made, in most jobs, since a master has saved its journal last and until the next is there.
KEPT_STEPS = 8192


class Reporting:
    """Every worker keeps its last steps, and rank 0 sends them.

    What a rank 0 that is killed did not come to send, the next one sends. What a stream may have lost is sent again in the
    next: the master takes each step once.

    Which thread writes what is said in `WorkerCore`. Between the training thread and the others are `_moved` and `totals`,
    each of which is replaced as a whole, and a queue of reports.
    """

    def __init__(self) -> None:
        self.interval = math.inf  # of heartbeats, until the master has said how often in the present stream
        self.clock = PauseClock()
        self.times = StepClock()
        self.totals = (0, 0)  # steps and epochs that there are to do in all, as far as is known; for the time left
        self._made: deque[m.StepReport] = deque(maxlen=KEPT_STEPS)  # put in by the training thread
        self._sent = (0, 0)  # world and step of the last report that was sent
        self._is_reporter = False
        self._moved = (0, Activity.UPDATE)  # how often something was done, and what is done now
        self._beat_at: float | None = None
        self._last_step_at: float | None = None
        self._world: World | None = None
        self._grew = False

    def enter(self, world: World) -> None:
        self._grew = self._world is None or world.size > self._world.size
        self._world = world
        self._is_reporter = world.rank == 0

    def leave(self) -> None:
        """Between two worlds nobody reports."""
        self._is_reporter = False
        self.times.forget()

    def training_begins(self, now: float) -> None:
        self.clock.mark("synced", now)
        self.times.resume(now)

    def advance(self, activity: Activity, now: float) -> None:
        """Something was done, and this is begun."""
        self._moved = (self._moved[0] + 1, activity)
        self.times.turn_to(activity, now)

    def voted(self, device_seconds: float, now: float) -> None:
        self.advance(Activity.UPDATE, now)
        self.times.passes_ended(device_seconds)

    def resume_clock(self, now: float) -> None:
        """Training goes on after what is neither a step nor a pause, such as an evaluation."""
        self.clock.resume(now)
        self.times.resume(now)
        self._last_step_at = now

    def count(
        self,
        progress: Progress,
        loss: float,
        samples: int,
        learning_rate: float,
        now: float,
        *,
        ends_epoch: bool,
        compared: int = 0,
    ) -> None:
        assert self._world is not None, "steps are made in a world"
        self.times.step_made(now)
        seconds = now - self._last_step_at if self._last_step_at is not None else 0.0
        self._last_step_at = now
        self._made.append(
            m.StepReport(
                step=progress.step,
                epoch=progress.epoch,
                loss=loss,
                samples=samples,
                learning_rate=learning_rate,
                seconds=seconds,
                world_version=self._world.version,
                total_samples=progress.samples,
                ends_epoch=ends_epoch,
                compared=compared,
            )
        )

    def pause_ended(self, now: float) -> m.Notice | None:
        """The pause that is over with the step just made, if there was one."""
        assert self._world is not None, "steps are made in a world"
        return self.clock.step_done(now, world_version=self._world.version, grew=self._grew)

    def flush(self) -> list[m.Message]:
        """The steps that were not sent."""
        if not self._is_reporter:
            return []
        sent = self._sent
        fresh = takewhile(lambda report: (report.world_version, report.step) > sent, reversed(self._made.copy()))
        steps = tuple(fresh)[::-1]
        if not steps:
            return []
        self._sent = (steps[-1].world_version, steps[-1].step)
        return [m.Progress(steps, *self.totals)]

    def again(self) -> list[m.Message]:
        """For a new stream all the steps that are kept, as some may have been lost in the one before.

        Heartbeats wait until the master has taken the stream up. With thousands of workers that takes a while, and the
        heartbeats of that time would come all at once.
        """
        self._sent, self.interval = (0, 0), math.inf
        return self.flush()

    def tick(self, world_version: int, step: int, now: float) -> list[m.Message]:
        out = self.flush()
        is_due = self._beat_at is None or now - self._beat_at >= self.interval
        if is_due and self.interval < math.inf:
            moved, activity = self._moved
            self._beat_at, ending = now, activity is Activity.END
            waiting = ending or activity is Activity.WAIT
            out.append(m.Heartbeat(world_version, step, moved, waiting, self.times.last_steps(), ending))
        return out


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

    def step_done(self, now: float, *, world_version: int, grew: bool) -> m.Notice | None:
        """Returns the pause that this step ended, if one was under way on a survivor: seconds without training, split by what they
        went into. ``first_step`` is by what the first step took longer than an ordinary one before: with more workers for the same
        global batch it may well be shorter, and is then zero."""
        before, self._last_step = self._last_step, now
        marks, self._marks = self._marks, {}
        if before is None or "left" not in marks or "synced" not in marks:
            if before is not None and not marks:
                self._durations.append(now - before)
            return None
        ordinary = statistics.median(self._durations) if self._durations else 0.0
        broken, torn = self._broken, self._torn
        self._broken, self._torn = False, 0
        parts = {
            "notice": marks["left"] - before,
            "drain": marks["stopped"] - marks["left"],
            "rendezvous": marks["joined"] - marks["stopped"],
            "init": marks["started"] - marks["joined"],
            "sync": marks["synced"] - marks["started"],
            "first_step": max(0.0, now - marks.get("resumed", marks["synced"]) - ordinary),
        }
        kind = "failure" if broken else "grow" if grew else "shrink"
        told = {"world": world_version, "kind": kind, **parts, "total": sum(parts.values()), "steps_torn": torn}
        return m.Notice("pause", told)
