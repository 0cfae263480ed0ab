"""A history before it happens: a job, how its surroundings behave, and the faults that befall it, all from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """``who`` picks among those there are; ``after`` is a number of instructions between the moment and the fault."""

    KILL = "a worker is killed"
    LOSE_NODE = "a worker's node is lost: connections to it stay silent, and its end is reported late"
    FREEZE = "a worker freezes for a while"
    TERMINATE = "a worker gets SIGTERM, and is killed if it stays"
    TERMINATE_AT_END = "a worker gets SIGTERM after its last step"
    KILL_AT_END = "a worker is killed after its last step"
    RAISE = "the user's code raises"
    CRASH = "a worker crashes"
    EXIT = "a worker ends with exit code 0 before it has trained"
    SLOW_START = "the next workers take too long to start"
    CUT = "a worker's connection to the master breaks, and can't be opened for a while"
    FLICKER = "a worker's connection to the master breaks"
    TEAR = "a collective succeeds for some members and fails for the others"
    BREAK = "a collective fails"
    PLACES = "the cluster has places for fewer workers for a while"
    SCALE = "the job is scaled"
    STOP = "the job is stopped"
    KILL_MASTER = "the master is killed, and another starts from what was saved"
    AGED_MASTER = "the master is killed, and another starts from an older save"
    BLANK_MASTER = "the master is killed, and nothing of what it saved is found"
    SECOND_MASTER = "the master is cut off from the cluster's API, not from all workers, and another is started"
    STORE_DOWN = "nothing can be saved for a while"
    # Only in jobs whose workers become unlike.
    OTHER_DATA = "workers that start for a while have other data, or can't read them"
    DRIFT = "a worker's weights become others, and nobody says so"
    # Only in jobs on hostile nodes.
    REJECT = "a node rejects every pod at once"
    EVICT_ALL = "every worker is evicted as soon as it runs"
    TERMINATE_ALL = "all workers get SIGTERM at once"


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: Kind
    who: int = 0
    seconds: float = 0.0
    after: int = 0

    def __str__(self) -> str:
        text = f"{self.at:6.2f} s  {self.kind} (who: {self.who}"
        text += f", {self.seconds:.2f} s" if self.seconds else ""
        return text + (f", {self.after} instructions later)" if self.after else ")")


class Commits(StrEnum):
    EACH_STEP = "after each step"
    SOME_STEPS = "after every third step"
    FIRST = "at the top of the loop"
    EACH_STEP_AND_EPOCH = "after each step and each epoch"


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    workers: int
    minimum: int
    epochs: int
    samples: int  # of an epoch
    global_batch: int | None
    worker_batch: int | None
    micro_batch: int
    commits: Commits
    drop_last: bool
    handover: bool  # a folder that all workers see
    export: float  # seconds of work after the last step
    noise: float  # of the launcher's reports, the share that comes twice, late or after a resync
    faults: tuple[Fault, ...]
    calm: float  # from when on there are no faults
    policy: bool = False  # the job chooses its number of workers, by a curve that changes at random
    in_parts: bool = False  # nothing is trained: a pass over data, of which each worker puts its part away
    processes: int = 1  # of each worker, which share one model among themselves

    def __str__(self) -> str:
        batch = f"global batch {self.global_batch}" if self.global_batch else f"{self.worker_batch} samples a worker"
        about = f"{self.minimum}-{self.workers} workers, {self.epochs} epochs of {self.samples} samples, {batch}"
        about += ", as many as pay" if self.policy else ""
        about += ", in parts" if self.in_parts else ""
        about += f", {self.processes} processes a worker" if self.processes > 1 else ""
        style = f"commits {self.commits}"
        lines = [f"seed {self.seed}: {about}, {style}", *(f"  {fault}" for fault in self.faults)]
        return "\n".join([*lines, f"  {self.calm:6.2f} s  no more faults"])


# How often each befalls a job; those that end it are rare. What is not named is as frequent as one.
_OFTEN: dict[Kind, float] = {
    Kind.KILL: 5,
    **dict.fromkeys((Kind.TERMINATE, Kind.TEAR, Kind.KILL_MASTER), 4),
    **dict.fromkeys((Kind.CUT, Kind.FLICKER, Kind.BREAK), 3),
    **dict.fromkeys((Kind.LOSE_NODE, Kind.FREEZE, Kind.TERMINATE_AT_END, Kind.SCALE), 2),
    **dict.fromkeys((Kind.SECOND_MASTER, Kind.STORE_DOWN), 2),
    **dict.fromkeys((Kind.RAISE, Kind.EXIT, Kind.STOP), 0.3),
    Kind.SLOW_START: 0.4,
    Kind.BLANK_MASTER: 0.5,
}
_UNLIKE, _HOSTILE = (Kind.OTHER_DATA, Kind.DRIFT), (Kind.REJECT, Kind.EVICT_ALL, Kind.TERMINATE_ALL)
_KINDS = tuple(kind for kind in Kind if kind not in (*_UNLIKE, *_HOSTILE))
_SHARES = tuple(_OFTEN.get(kind, 1) for kind in _KINDS)
MOST_FAULTS = 12


def make_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    workers = draw.choice((1, 2, 3, 4, 4, 4))
    fixed = draw.random() < 0.7
    steps = 20  # of an epoch with all workers
    batch = draw.choice((8, 7)) if fixed else 2
    samples = steps * (batch if fixed else batch * workers) - draw.choice((0, 0, 3))
    last = draw.choice((3.0, 5.0, 10.0))
    return Plan(
        seed=seed,
        workers=workers,
        minimum=draw.randint(1, max(1, workers - 1)),
        epochs=3,
        samples=samples,
        global_batch=batch if fixed else None,
        worker_batch=None if fixed else batch,
        micro_batch=draw.choice((2, 4)),
        commits=draw.choice(tuple(Commits)),
        drop_last=draw.random() < 0.2,
        handover=draw.random() < 0.7,
        export=draw.choice((0.0, 0.3, 1.5)),
        noise=draw.choice((0.0, 0.2)),
        faults=_draw_faults(draw, last),
        calm=last + 0.5,
    )


def of_a_pass(plan: Plan) -> Plan:
    """The same history of a job that evaluates or predicts."""
    part, samples = 3 + plan.seed % 4, 3 * plan.samples
    made = replace(plan, in_parts=True, epochs=1, samples=samples, commits=Commits.EACH_STEP, drop_last=False)
    return replace(made, global_batch=None, worker_batch=part)


def with_unlike_workers(plan: Plan) -> Plan:
    """The same history, in which workers also differ from each other for a while."""
    return _with_more(plan, "unlike", _UNLIKE, (3, 1))


def with_hostile_nodes(plan: Plan) -> Plan:
    """The same history, in which one worker after another is also taken away for a while."""
    return _with_more(plan, "hostile", _HOSTILE, (1, 1, 1))


def _with_more(plan: Plan, why: str, kinds_there_are: tuple[Kind, ...], shares: tuple[float, ...]) -> Plan:
    draw = random.Random(f"{plan.seed} {why}")
    more = (
        Fault(round(draw.uniform(0.0, plan.calm - 0.5), 2), kind, draw.randrange(100), draw.choice((0.5, 2.0, 5.0)))
        for kind in draw.choices(kinds_there_are, shares, k=draw.randint(1, 3))
    )
    return replace(plan, faults=tuple(sorted((*plan.faults, *more), key=lambda fault: fault.at)))


def _draw_faults(draw: random.Random, last: float) -> tuple[Fault, ...]:
    """Many of them at once: what goes wrong while something else is being mended is where protocols break."""
    moments = [draw.uniform(0.0, last) for _ in range(draw.randint(1, 3))]
    kinds = draw.choices(_KINDS, _SHARES, k=draw.randint(0, MOST_FAULTS))
    faults = (
        Fault(
            at=round(_draw_moment(draw, moments, last), 2),
            kind=kind,
            who=draw.randrange(100),
            seconds=round(draw.choice((0.1, 0.5, 2.0, 5.0)) * draw.uniform(0.5, 1.5), 2),
            after=draw.choice((0, draw.randrange(8), draw.randrange(40))),
        )
        for kind in kinds
    )
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _draw_moment(draw: random.Random, moments: list[float], last: float) -> float:
    if draw.random() < 0.3:
        return draw.uniform(0.0, last)
    return min(last, draw.choice(moments) + draw.choice((0.03, 0.3, 1.5)) * draw.random())
