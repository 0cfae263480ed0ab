"""One step of one worker: what all members say with its gradients, where training stands then, and what of that is safe.

Parameters change only after every gradient of a step has arrived from every worker. So a worker whose step failed
stands exactly before that step, and saving need not copy parameters or optimizer slots. If a step was made since all was
saved, weights can't go back, and so nothing does: all parts of a state are of one moment.

In a world of one no step can be torn. Nothing is saved there, and what was saved is out of date. All is saved when that
world is left, and again when the next one is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import Progress, SampleOrder, Samples, StepPlan, checksum_of
from elasticdl.elastic.core.protocol import ALONE, SaveScope, World, WorldBroken
from elasticdl.elastic.core.reporting import Activity, Reporting
from elasticdl.job import messages as m

# Whether all members hold the same number, told by sums alone.
#
# For whole numbers c of N members, N·Σc² = (Σc)² holds only if all are equal (Cauchy and Schwarz). So a checksum travels along
# in the vector that is summed over the members with each step, in summands that are small enough for float32 to hold each sum
# exactly in worlds of up to `MOST_MEMBERS`.

PIECES, BITS = 5, 6
SIZE = 2 * PIECES  # numbers that a checksum takes in the vector
MOST_MEMBERS = 1 << 24 - 2 * BITS
_SHOWN = 4096  # samples of a batch that are compared one by one


def summands(checksum: int) -> list[float]:
    """What a member adds to the vector. ``checksum``: of 30 bits or more, of which the last 30 count."""
    values = [checksum >> BITS * number & (1 << BITS) - 1 for number in range(PIECES)]
    return [float(each) for value in values for each in (value, value * value)]


def all_equal(sums: Sequence[float], members: int) -> bool:
    """Whether this many members have added the same summands."""
    if members == 1:
        return True
    whole = [round(each) for each in sums]
    return all(members * whole[i + 1] == whole[i] ** 2 for i in range(0, SIZE, 2))


def newcomers_alone(members: Sequence[tuple[int, bool]], differing: Container[int]) -> tuple[int, ...]:
    """Who of those that differ from rank 0's worker is refused: all, if rank 0 has trained and none of them has; else nobody.

    ``members``: by rank, the worker, and whether it has made a step of the job.
    """
    found = [(worker, trained) for worker, trained in members if worker in differing]
    is_theirs = members[0][1] and not any(trained for _, trained in found)
    return tuple(worker for worker, _ in found) if is_theirs else ()


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a member believes to be the global batch of a step; told only if the members differ."""

    worker: int
    epoch: int
    step: int
    samples: int
    begins: tuple[str, ...]  # the samples themselves, as text, if they are not too many
    checksum: int  # of them all
    trained: bool = False  # this worker has made a step of the job before

    @classmethod
    def of(cls, worker: int, epoch: int, step: int, samples: Samples, *, trained: bool = False) -> Self:
        begins = tuple(map(str, samples[:_SHOWN]))
        return cls(worker, epoch, step, len(samples), begins, checksum_of(samples), trained)

    def differs(self, other: BatchFacts) -> str:
        """In words; empty if it does not as far as these facts go."""
        who = f"worker {self.worker} and worker {other.worker}"
        if self.epoch != other.epoch:
            return f"{who} have batches of different epochs, {self.epoch + 1} and {other.epoch + 1}"
        if self.step != other.step:
            return f"{who} are not at the same step"
        if self.samples != other.samples:
            return f"{who} have batches of different sizes, {self.samples} and {other.samples} samples"
        pairs = zip(self.begins, other.begins, strict=True)
        at = next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if at is None:
            return "" if self.checksum == other.checksum else f"{who} have different batches, from sample {_SHOWN} on"
        return (
            f"{who} have different batches: from sample {at + 1} of {self.samples} on they differ, sample "
            f"{self.begins[at]} of the data and sample {other.begins[at]}"
        )


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What differs between the members of a step, in one line. ``refused``: workers that came later and alone differ. No line: nothing
    differs. Nobody refused: the job can't go on."""

    line: str = ""
    refused: tuple[int, ...] = ()

    def refuse(self, worker: int) -> None:
        """All members come here, each with its number. It returns where nobody is refused.

        Raises:
            UserError: this worker is refused.
            WorldBroken: another worker is.
        """
        if worker in self.refused:
            raise UserError(f"refused: {self.line}")
        if self.refused:
            raise WorldBroken(f"workers {list(self.refused)} are refused: {self.line}")

    @classmethod
    def of(cls, facts: Sequence[BatchFacts], data: Sequence[str] = ()) -> Self:
        """``facts``: of all members, by rank. ``data``: how their data differ from rank 0's, in words."""
        root = facts[0]
        found = [(other, root.differs(other)) for other in facts]
        for number, text in enumerate(data):
            other, what = found[number]
            which = f"worker {root.worker} and worker {other.worker} have different data: {text}" if text else ""
            found[number] = other, what or which
        found = [(other, what) for other, what in found if what]
        if not found:
            return cls()
        return cls(
            f"step {root.step}: {found[0][1]}: all workers must draw the same samples in the same order; give what draws them a "
            "seed, and the same data on every worker",
            newcomers_alone([(each.worker, each.trained) for each in facts], {other.worker for other, _ in found}),
        )


# Places in the small vector that is summed over the members along with the gradients.
LEAVING, SAMPLES, LOSS, STOPPING, ENDED, MEMBERS, BATCH = 0, 1, 2, 3, 4, 5, 6
STATE = BATCH + SIZE
VOTE_SIZE = STATE + SIZE


@dataclass(frozen=True, slots=True)
class Vote:
    """The sum of all members' votes."""

    leaving: bool  # somebody was told that the world should be left
    samples: int  # of the global batch
    loss: float  # mean over the global batch
    stopping: bool = False  # rank 0's callbacks want training to end
    ended: int = 0  # members whose training function has returned: they make no step
    one_batch: bool = True  # all members make the step on the same samples
    one_state: bool = True  # and from the same state, if that was looked at

    @classmethod
    def of(cls, sums: Sequence[float]) -> Vote:
        """From the summed vector."""
        samples = sums[SAMPLES]
        loss = sums[LOSS] / samples if samples else float("nan")
        stopping, ended = sums[STOPPING] > 0, round(sums[ENDED])
        one_batch, one_state = (all_equal(sums[at:], round(sums[MEMBERS])) for at in (BATCH, STATE))
        leaving = sums[LEAVING] > 0
        return cls(leaving, round(samples), loss, stopping, ended, one_batch, one_state)


def mark(ballot: list[float], batch: int, state: int) -> None:
    """Say that this is a member's ballot, and the checksums of its batch and its state; once a step."""
    ballot[MEMBERS] = 1.0
    ballot[BATCH:STATE] = summands(batch)
    ballot[STATE : STATE + SIZE] = summands(state)


class Keeper(Protocol):
    """Of a training state, what can be saved and gone back to."""

    def save(self, scope: SaveScope) -> None: ...

    def restore(self) -> None: ...


class Position:
    """Of one training state. The training thread alone writes here, and saves at once.

    Without a ``keeper`` the script saves by itself.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        has_state: bool = False,
        order: SampleOrder | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.progress = self.saved = progress or Progress()
        self.has_state = has_state
        self.synced_in = 0  # version of the world in which it last stood where rank 0 stood
        self.order = order
        self.batch: StepPlan | None = None  # that the present step is made on
        self.vote: Vote | None = None  # of the last step
        self.is_reduced = False  # the gradients of all have arrived, and the parameters have not changed
        self.unsaved = False  # a step was made since all was saved
        self.is_stale = keeper is not None  # what was saved is of an earlier moment than a step may be torn from
        self.given = self.made = self.commits = 0  # batches, steps and commits, by this process
        self._alone = True  # in a world of one, or in none
        self._keeper = keeper
        self._committed: Progress | None = None  # where training stood, if a commit was the last thing done

    @property
    def safe(self) -> Progress:
        """Where training stands if the present world breaks."""
        return self.progress if self.unsaved or self.is_stale else self.saved

    def at_end(self, workers: int) -> bool:
        """Whether no step is left of the present epoch."""
        return self.order is not None and not self.order.remaining_steps(self.progress, workers)

    def ends_epoch(self, workers: int) -> bool:
        """Whether the step that was made last is the last of its epoch."""
        return self.at_end(workers) or (self.batch is not None and self.batch.ends_epoch)

    def begin(self, plan: StepPlan, settings_changed: Callable[[], bool]) -> None:
        """From here on a step may be torn: save what no commit has saved and can't be done again.

        ``settings_changed``: whether what the optimizer is told differs from what was saved.
        """
        changed = not self._alone and self._committed == self.progress and settings_changed()
        if self.unsaved or changed:
            self._save()
        self._committed, self.is_reduced = None, False
        self.batch = plan
        self.given += 1

    def voted(self, vote: Vote) -> bool:
        """The gradients of all members have arrived. False: no step can be made of these votes."""
        self.vote = vote
        self.is_reduced = vote.one_batch and not vote.ended and (self.batch is None or vote.samples == self.batch.batch)
        return self.is_reduced

    def step_made(self) -> None:
        """The parameters have changed."""
        assert self.vote is not None, "a step is made after its vote"
        self.is_reduced = False
        self.progress = self.batch.after if self.batch else self.progress.after(self.vote.samples)
        self.made += 1
        if self._alone:
            self.is_stale = True
        else:
            self.unsaved = True
            self.saved = self.progress
            self._keep(SaveScope.WITH_PARAMETERS)

    def commit(self, workers: int) -> None:
        """A step that is reduced and not made is skipped: a GradScaler does so if gradients are not finite."""
        if self.is_reduced and self.batch is not None:
            self.progress = self.batch.after
            if not self._alone:
                self._keep(SaveScope.WITH_PARAMETERS)
        elif self.batch is None and self.at_end(workers):
            self.progress = self.progress.next_epoch()
        self.is_reduced = False
        self._committed = self.progress
        self.commits += 1
        if self._alone:
            self.is_stale = True
        else:
            self._save()

    def counted(self) -> None:
        """A step was made and committed of which nothing is known but that."""
        self.progress = self.saved = self.progress.after(0)
        self.made += 1

    def leave(self) -> None:
        """The world, or the training, is left between two steps: a batch in hand is given again."""
        self.batch = self.vote = None
        self.is_reduced = False
        if self.unsaved or self.is_stale:
            self._save()

    def undo(self) -> None:
        """Drop a torn step: back to what was saved, or to where the torn step began if others came in between."""
        self.leave()
        self.progress = self.saved
        self._committed = None
        if self._keeper is not None:
            self._keeper.restore()

    def loaded(self, progress: Progress) -> None:
        """All parts of the state are others now; the world may break before this is told as a moment of its own."""
        self.progress = progress
        self.is_stale = True
        self._save()

    def synced(self, progress: Progress, world_version: int, *, alone: bool) -> None:
        """This member stands where rank 0 stands. ``alone``: there is no other."""
        self.synced_in, self._alone = world_version, alone
        self.has_state = True
        self.batch = self.vote = self._committed = None
        self.is_reduced = False
        self.loaded(progress)

    def disagreement(self, workers: int, remedy: str = "") -> str:
        """Why no step can be made of the last votes."""
        vote, batch, step = self.vote, self.batch, self.progress.step
        assert vote is not None, "members disagree in a vote"
        if vote.ended or batch is None:
            cure = (
                "the training function must return" if self.order is not None else "the scripts must leave their loops"
            )
            return (
                f"{vote.ended} of {workers} workers ended their training after step {step} and the others go on: "
                f"{cure} after the same step on all workers, so decide by what all have alike (a step's number, a mean over all), "
                "not by one worker's part of the data or its clock"
            )
        cure = f": {remedy}" if remedy else ""
        return f"step {batch.step} was made on {vote.samples} samples instead of {batch.batch}{cure}"

    def oversight(self) -> str:
        """What looks forgotten in a training that has ended; empty if nothing does."""
        if self.progress.step == 0:
            return "training has ended without a step: no optimizer.step() of the optimizer that the state was given"
        if self.made and not self.commits:
            return (
                f"{self.made} steps were made without a state.commit(): no worker could join or leave meanwhile; call it "
                "after each step"
            )
        return ""

    def _save(self) -> None:
        if self.is_stale:
            self._keep(SaveScope.WITH_PARAMETERS)
        self._keep(SaveScope.AT_COMMIT)
        self.unsaved = self.is_stale = False
        self.saved = self.progress

    def _keep(self, scope: SaveScope) -> None:
        if self._keeper is not None:
            self._keeper.save(scope)


# What the training thread says of each step, without the lock and without an event.


class WorkerState(StrEnum):
    PREPARING = "preparing"  # has not asked for a world: it imports, builds its model, or is between two trainings
    WAITING = "waiting"  # has asked for a world
    CONNECTING = "connecting"  # has a world, whose collective is being connected
    SYNCING = "syncing"  # the members are brought to rank 0's state
    TRAINING = "training"  # in the training function; where in a step, its position says
    ENDING = "ending"  # its training function has returned, and those of the others are awaited
    COMPLETE = "complete"  # all training functions have returned
    LEAVING = "leaving its world"  # the collective is being closed; it asks for the next world then
    GONE = "gone"  # it leaves for good


IN_TRAINING = (WorkerState.TRAINING, WorkerState.ENDING)
IN_WORLD = (WorkerState.CONNECTING, WorkerState.SYNCING, *IN_TRAINING, WorkerState.COMPLETE)
# Steps that a script makes before it asks for a world are its own.
MAKES_STEPS = (WorkerState.PREPARING, WorkerState.TRAINING)


class StepCore:
    """The part of a worker's core that is told of each step; `WorkerCore` has the part that events may change.

    Only the training thread calls the methods here. While it trains, nobody else changes ``state`` or ``world``; ``leaving`` changes with events.
    """

    def __init__(self, *, under_master: bool) -> None:
        self.under_master = under_master
        self.state = WorkerState.PREPARING if under_master else WorkerState.TRAINING
        self.world: World = ALONE  # the present one, or the last
        self.leaving = False  # this member's vote: whether the present world is to be left after this step
        self.position = Position()
        self.reporting = Reporting()

    def bind(self, position: Position) -> Position:
        """There is a training state. From now on the core speaks of it, except in a world, whose members train another.

        Returns the position that the core speaks of.
        """
        in_others = self.under_master and self.state in (WorkerState.CONNECTING, *IN_TRAINING)
        if not in_others:
            self.position = position
        return self.position

    def begin(self, plan: StepPlan, settings_changed: Callable[[], bool] = lambda: False) -> None:
        """A batch is given; see `Position.begin`."""
        if self.state in MAKES_STEPS:
            self.reporting.times.samples = plan.samples
            self.position.begin(plan, settings_changed)

    def voted(self, vote: Vote, now: float, *, device_seconds: float = 0.0) -> bool:
        """The gradients of all members have arrived, and with them their votes. False: no step can be made of these.

        ``device_seconds``: from the batch's begin to the end of this worker's passes, by the device's own clock; 0 where
        host and device go together.
        """
        self.reporting.voted(device_seconds, now)
        return self.position.voted(vote)

    def step_made(self, learning_rate: float, now: float, *, compared: int = 0) -> m.Notice | None:
        """The parameters have changed. Returns the pause that is over with this step, if one is.

        ``compared``: members of whose states the vote has shown that they were one before; 0 if it was not looked at.
        """
        position, vote = self.position, self.position.vote
        if self.state not in MAKES_STEPS or not position.is_reduced or vote is None:
            return None
        position.step_made()
        ends_epoch = position.ends_epoch(self.world.size)
        self.reporting.count(
            position.progress, vote.loss, vote.samples, learning_rate, now, ends_epoch=ends_epoch, compared=compared
        )
        return self.reporting.pause_ended(now)

    def commit(self) -> bool:
        """Everything up to here is safe. True: all members have voted to leave this world now."""
        if self.state not in MAKES_STEPS:
            return False
        self.position.commit(self.world.size)
        vote = self.position.vote
        return self.state is WorkerState.TRAINING and vote is not None and vote.leaving

    def pass_by(self, now: float) -> m.Notice | None:
        """A script of Horovod's is between two steps."""
        if self.state is not WorkerState.TRAINING:
            return None
        self.reporting.advance(Activity.WAIT, now)
        return self.reporting.pause_ended(now)

    def count_step(self, now: float) -> None:
        """A script of Horovod's commits, which counts as a step; nothing is known of its samples and epochs."""
        if self.state is not WorkerState.TRAINING:
            return
        self.position.counted()
        self.reporting.count(self.position.progress, 0.0, 0, 0.0, now, ends_epoch=False)

    def synced(self, progress: Progress) -> None:
        """This member stands where rank 0 stands; to be told by `Trigger.SYNCED`, too."""
        self.position.synced(progress, self.world.version, alone=self.world.size == 1)
