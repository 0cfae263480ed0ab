"""What happens in a storm, and when: made from a seed. Each disturbance comes when the job has recovered from those before.

One worker that holds the state is always left in peace: a storm is what a job must survive without a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from benchmarks.processes import wait_until
from benchmarks.storm.job import HEARTBEAT_TIMEOUT, PROGRESS_TIMEOUT, LastingJob
from benchmarks.storm.surroundings import MASTER, Disk, Network
from benchmarks.storm.training import check_journal
from elasticdl.cli.commands.jobs import parse_workers
from elasticdl.job.spec import WorkerRange

K = TypeVar("K")

SHORTEST_CALM, LONGEST_CALM = 0.2, 2.0
SECOND_COMES = 0.25  # of all, while the job is recovering from the one before
LONGEST_DELAY = 0.5


class Kind(StrEnum):
    KILL = "a worker gets SIGKILL"
    TERM = "a worker gets SIGTERM"
    STOP = "a worker gets SIGSTOP, and SIGCONT before it is missed"
    FREEZE = "a worker gets SIGSTOP, until it is given up"
    SCALE = "elasticdl scale"
    KILL_MASTER = "the master gets SIGKILL, and another is started"
    FILL_DISK = "the disk of the checkpoints is full for a while"
    CUT_FROM_MASTER = "no way between a worker and the master for a while"
    CUT_FROM_PEER = "no way between two workers for a while"


# Those that take longer than the rest are rarer.
WEIGHTS = {
    Kind.KILL: 4,
    Kind.TERM: 4,
    Kind.STOP: 5,
    Kind.FREEZE: 1,
    Kind.SCALE: 3,
    Kind.KILL_MASTER: 3,
    Kind.FILL_DISK: 3,
    Kind.CUT_FROM_MASTER: 3,
    Kind.CUT_FROM_PEER: 3,
}


@dataclass(frozen=True, slots=True)
class Disturbance:
    """``pick`` chooses whom it befalls, ``length`` how long it lasts; both from 0 to 1. ``after``: seconds since another
    of the same moment.
    """

    kind: Kind
    pick: float
    length: float
    after: float = 0.0

    def choose(self, options: Sequence[K]) -> K:
        return options[int(self.pick * len(options))]


@dataclass(frozen=True, slots=True)
class Moment:
    """``calm``: seconds since the job has recovered from the moment before."""

    calm: float
    disturbances: tuple[Disturbance, ...]


def each_kind_first(rng: random.Random, weights: Mapping[K, float], count: int) -> list[K]:
    """Each kind before any a second time, then in any order."""
    once = rng.sample(list(weights), min(count, len(weights)))
    kinds = [*once, *rng.choices(list(weights), list(weights.values()), k=count - len(once))]
    rng.shuffle(kinds)
    return kinds


def schedule(seed: int, count: int, processes: int = 1) -> list[Moment]:
    """So many disturbances; sometimes a second one comes while the job recovers from the first.

    Workers of several ``processes`` write no checkpoints.
    """
    rng = random.Random(seed)
    weights = {kind: weight for kind, weight in WEIGHTS.items() if processes == 1 or kind is not Kind.FILL_DISK}
    moments: list[Moment] = []
    for kind in each_kind_first(rng, weights, count):
        calm, second = rng.uniform(SHORTEST_CALM, LONGEST_CALM), rng.random() < SECOND_COMES
        disturbance = Disturbance(kind, rng.random(), rng.random(), rng.uniform(0, LONGEST_DELAY))
        if second and moments and _has_room(moments[-1], kind):
            moments[-1] = replace(moments[-1], disturbances=(*moments[-1].disturbances, disturbance))
        else:
            moments.append(Moment(calm, (replace(disturbance, after=0.0),)))
    return moments


def _has_room(moment: Moment, kind: Kind) -> bool:
    return len(moment.disturbances) == 1 and moment.disturbances[0].kind is not kind


def ranges_up_to(most: int) -> list[WorkerRange]:
    """What the job is scaled to; the last is what it begins with. With 2, a loss has the other one wait for its replacement."""
    return [parse_workers(text) for text in ("2", *(f"1-{number}" for number in range(3, most + 1)))]


RECOVERY_SECONDS = 180.0  # nothing takes as long, also on a machine that has much else to do
# How long each lasts, at least and at most.
LENGTHS = {
    Kind.STOP: (0.1, 0.6 * HEARTBEAT_TIMEOUT),
    Kind.KILL_MASTER: (0.0, 2.0),
    Kind.FILL_DISK: (0.5, 2.5),
    Kind.CUT_FROM_MASTER: (0.2, 1.5 * HEARTBEAT_TIMEOUT),
    Kind.CUT_FROM_PEER: (0.2, 1.2 * PROGRESS_TIMEOUT),
}
LONG_SECONDS = 10.0
FIRST_GUESS = 4.0  # seconds between two moments
SPARE_STEPS = 0.05  # of all, that are not used up before the storm is over
SLOWEST_STEP = 1.0


@dataclass(frozen=True, slots=True)
class Brought:
    """``at``: by the clock of the journal. ``recovery``: seconds from the last of them to a step of those who are left."""

    kinds: tuple[Kind, ...]
    at: float
    recovery: float


@dataclass(slots=True)
class Story:
    """What was done, and when, as it is done; whoever shows progress reads it."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    counts: Counter[Kind] = field(default_factory=Counter)
    brought: list[Brought] = field(default_factory=list)

    def tell(self, text: str) -> None:
        self.lines.append((time.time(), text))


class Driver:
    def __init__(
        self,
        job: LastingJob,
        network: Network,
        disk: Disk,
        story: Story,
        ranges: Sequence[WorkerRange],
        show: Callable[[], None],
    ) -> None:
        """``show`` is called often, to tell people how far it is."""
        self._job = job
        self._network = network
        self._disk = disk
        self._story = story
        self._show = show
        self._ends: list[tuple[float, Callable[[], None]]] = []  # of what lasts for a while
        self._doomed: set[int] = set()  # workers that will not come back
        self._shaken: set[int] = set()  # workers that may not come back
        self._ranges = ranges
        self._limits = ranges[-1]
        self._scaling: subprocess.Popen[bytes] | None = None

    def run(self, moments: Sequence[Moment]) -> None:
        began = time.monotonic()
        for number, moment in enumerate(moments):
            mean = (time.monotonic() - began) / number if number else FIRST_GUESS
            self._set_pace(mean * (len(moments) - number))
            self._wait_seconds(moment.calm)
            times = [self._bring(disturbance) for disturbance in moment.disturbances]
            self._recover()
            check_journal(self._job.journal.read())
            recovery = time.time() - times[-1]
            self._story.tell(f"step {self._job.step()}: recovered after {recovery:.1f} s")
            kinds = tuple(each.kind for each in moment.disturbances)
            self._story.brought.append(Brought(kinds, times[0], recovery))

    def close(self) -> None:
        if self._scaling:
            self._scaling.kill()
            self._scaling.wait()

    # ---- what is done ----

    def _bring(self, disturbance: Disturbance) -> float:
        """Returns when it was done."""
        self._wait_seconds(disturbance.after)
        kind, what = disturbance.kind, ""
        shortest, longest = LENGTHS.get(kind, (0.0, 0.0))
        seconds = shortest + (longest - shortest) * disturbance.length
        match kind:
            case Kind.KILL | Kind.TERM:
                calm = self._wait_for_calm(2)
                others = {*self._job.workers()} - {*calm} - self._doomed - self._shaken  # they start, or wait
                victim = disturbance.choose([*calm, *others])
                self._doomed.add(victim)
                process = self._process_of(victim, disturbance)
                self._signal(process, signal.SIGKILL if kind is Kind.KILL else signal.SIGTERM)
                what = f"worker {victim}, process {process}"
            case Kind.FREEZE | Kind.STOP:
                victim = disturbance.choose(self._wait_for_calm(2))
                (self._doomed if kind is Kind.FREEZE else self._shaken).add(victim)
                process = self._process_of(victim, disturbance)
                self._signal(process, signal.SIGSTOP)
                what = f"worker {victim}, process {process}"
                if kind is Kind.STOP:
                    self._later(seconds, f"worker {victim} goes on", lambda: self._signal(process, signal.SIGCONT))
            case Kind.SCALE:
                self._limits = disturbance.choose([each for each in self._ranges if each != self._limits])
                self._scaling = self._job.scale(self._limits)
                what = str(self._limits)
            case Kind.KILL_MASTER:
                self._job.kill_master()
                self._later(seconds, "a master is started", self._job.start_master)
            case Kind.FILL_DISK:
                self._disk.fill()
                self._later(seconds, "the disk is empty", self._disk.empty)
            case Kind.CUT_FROM_MASTER | Kind.CUT_FROM_PEER:
                what = self._cut(disturbance, seconds)
        self._story.counts[kind] += 1
        self._story.tell(f"step {self._job.step()}: {kind} {what}{f' ({seconds:.1f} s)' if seconds else ''}")
        return time.time()

    def _cut(self, disturbance: Disturbance, seconds: float) -> str:
        calm, workers = self._wait_for_calm(2), self._job.workers()
        victim = disturbance.choose(calm)
        one, self._shaken = workers[victim].host, self._shaken | {victim}
        other, what = MASTER, f"worker {victim}"
        if disturbance.kind is Kind.CUT_FROM_PEER:
            peer = disturbance.choose([each for each in calm if each != victim])
            other, self._shaken = workers[peer].host, self._shaken | {peer}
            what = f"workers {victim} and {peer}"
        self._network.cut(one, other)
        self._later(seconds, f"{what} can be reached again", lambda: self._network.heal(one, other))
        if other is MASTER:  # steps go on without it, so none shows whether it is given up
            self._later(seconds + HEARTBEAT_TIMEOUT, f"{what} is heard of again, or given up", lambda: None)
        return what

    def _process_of(self, worker: int, disturbance: Disturbance) -> int:
        """Its own, or one of those that it has started; 0 if it has left."""
        found = self._job.processes_of(worker) or [0]
        return found[int(disturbance.length * len(found))]

    def _signal(self, process: int, number: signal.Signals) -> None:
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, number)

    def _later(self, seconds: float, what: str, end: Callable[[], None]) -> None:
        def tell_and_end() -> None:
            self._story.tell(what)
            end()

        self._ends.append((time.monotonic() + seconds, tell_and_end))

    # ---- what is waited for ----

    def _wait_for_calm(self, least: int) -> list[int]:
        """So many workers that hold the state and were not disturbed; all there are."""

        def calm() -> set[int]:
            return {*self._job.holders()} & {*self._job.workers()} - self._doomed - self._shaken

        if len(calm()) < least:
            self._recover()
        self._wait(f"{least} undisturbed workers that train", lambda: len(calm()) >= least)
        return sorted(calm())

    def _recover(self) -> None:
        """Until nothing lasts any more, all who are doomed are out, and those who are left have made a step."""
        self._wait("the end of what lasts for a while", lambda: not self._ends)
        self._wait("elasticdl scale", self._has_scaled)

        def settled() -> bool:
            members = self._job.world()["members"]
            return len(members) <= self._limits.maximum and self._doomed.isdisjoint(members)

        self._wait("a world without those that were lost", settled)
        step = self._job.step()
        self._wait(f"a step after step {step}", lambda: self._job.step() > step)
        self._shaken.clear()
        self._doomed &= {*self._job.workers()}

    def _has_scaled(self) -> bool:
        if self._scaling is None:
            return True
        code = self._scaling.poll()
        if code is None:
            return False
        # It fails while there is no master.
        self._scaling = self._job.scale(self._limits) if code else None
        return self._scaling is None

    def _wait_seconds(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._wait("some seconds", lambda: time.monotonic() >= until)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        began, patient = time.monotonic(), True

        def meanwhile() -> None:
            nonlocal patient
            self._job.raise_if_over()
            now = time.monotonic()
            if patient and now - began > LONG_SECONDS:
                patient = False
                self._story.tell(f"step {self._job.step()}: waits for {what}")
                self._job.pace(SLOWEST_STEP)  # the steps are for the storm
            for each in [each for each in self._ends if each[0] <= now]:
                self._ends.remove(each)
                each[1]()
            self._show()

        wait_until(condition, RECOVERY_SECONDS, what, meanwhile)

    def _set_pace(self, seconds_left: float) -> None:
        """So that training lasts as long as the storm does."""
        steps = self._job.steps * (1 - SPARE_STEPS) - self._job.step()
        self._job.pace(min(SLOWEST_STEP, seconds_left / steps) if steps > 0 else SLOWEST_STEP)
