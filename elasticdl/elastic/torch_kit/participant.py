"""A worker's part in a loop that somebody else has written: a plain loop, or a trainer.

The loop believes that it is alone and has the global batch. It is given its part of each batch; the gradients of all workers are
summed before it looks at them. The world changes between two steps, or in the middle of a step that a lost worker has torn.
The batches of a torn step are divided anew, and their gradients are made again, from the same parameters.

With it what a front end adds: its `Host`, and what the hosts of trainers have in common.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import numpy.typing as npt
import torch

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPlan, MicroBatch, Progress, StepPlan, step_seed
from elasticdl.elastic.core.protocol import Stopped, World, WorldBroken, WorldChanged
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.agreements import Agreements, ScriptPosition
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OpenBatch, OwnLoader, PartsAhead, StandIn, SubBatch
from elasticdl.elastic.torch_kit.passes import least_samples
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.tensors import ElasticContext, RandomStreams, seed_generators, streams_apart
from elasticdl.elastic.training.pieces import Piece
from elasticdl.job import messages as m

log = logging.getLogger(__name__)

# What a front end adds, and what it is given.


class Outcome(Enum):
    """What becomes of the open batches."""

    MADE = "the gradients are everybody's; the parameters may change"
    BEHIND = "the other workers have made this step; this worker is on its way to where they are"
    DROPPED = "the script must be given these batches again"


def plan_of(open_batches: Sequence[OpenBatch], progress: Progress) -> StepPlan:
    """The step on these batches."""
    first, last = open_batches[0].batch, open_batches[-1].batch
    whole = last.indices if first is last else [index for given in open_batches for index in given.batch.indices]
    after = Progress(last.epoch, last.end, progress.step + 1, progress.samples + len(whole))
    parts = tuple(given.part for given in open_batches)
    return StepPlan(first.epoch, progress.step + 1, len(whole), after, parts, last.is_last, whole)


class Host:
    """A front end, as its participant sees it. It must have `left` and `remake`; the other methods have a default.

    docs/worker_side.md says what a front end calls, in which order, under "A trainer of another library".

    What loads a batch may draw from the global random streams, and so may a pass. A host puts them back after both (`Participant.apart`), so
    that all workers go on to draw alike.
    """

    # -- batches --

    def next_number(self, number: int) -> int:
        """The number of the batch that comes next in its epoch: ``number``, unless batches are given again."""
        return number

    def asks_for(self, batch: GlobalBatch) -> bool:
        """The script asks for this batch. Returns whether it has given up the batches before, of which it made no step."""
        return False

    def stands_before(self, batch: GlobalBatch) -> None:
        """The script is between two steps, and asks for this batch: from here a newcomer goes on. The world changes next, perhaps."""

    def passed_by(self, batch: GlobalBatch) -> None:
        """The script is given a stand-in next, in the place of this batch."""

    def loading(self, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Around the loading of this worker's part: it draws random numbers."""
        return contextlib.nullcontext()

    def opened(self, batch: GlobalBatch, part: MicroBatch, sample: Any) -> OpenBatch:
        """The script is given ``sample``, its part of this batch."""
        return OpenBatch(batch, part, sample)

    def step_over(self) -> None:
        """The parameters have changed by the open batches, or stay as they are for good."""

    # -- a step --

    def rides(self) -> Mapping[str, npt.ArrayLike]:
        """Small numbers, by name, that are summed with the gradients of the open batches; of the same names and shapes on all workers."""
        return {}

    def heard(self, rides: Rides) -> None:
        """The sums over all workers.

        Raises:
            UserError: the workers can't make one step.
        """

    # -- worlds --

    def rank_known(self) -> None:
        """This worker's rank may be another one, or is no longer that of a worker that catches up."""

    def arrived(self) -> None:
        """This worker stands where the job stands, and has its state."""

    def world_at_end(self) -> None:
        """The script is done, and its worker is in another world: who wrote files may be lost. What it has done with the model since is its own affair."""

    def left(self) -> None:
        """This worker leaves for good. Its process ends with status 0."""
        raise NotImplementedError

    # -- a step that is torn --

    def as_before_step(self) -> AbstractContextManager[None]:
        """Around the way to the next world, when a step is torn: what the script has changed for the step is as before it, as others may be sent
        the state. Afterwards it is as the script has left it."""
        return contextlib.nullcontext()

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        """These batches, of which this worker has these samples now, are made again next."""

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        """Add the gradients of ``sample``, a piece of a batch, by `Participant.backward` with this weight.

        Raises:
            WorldBroken: the step is torn again.
        """
        raise NotImplementedError

    def cannot_remake(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        """`remake` has raised this. Unless this method raises, the step is dropped, and the script is given the batches again."""
        raise error


class Participant:
    """From the first world to the end of the script. What differs between front ends is in `Host`."""

    _part: tuple[GlobalBatch, World, int, MicroBatch] | None = None  # that was asked for last, and by what

    def __init__(
        self,
        job: ElasticContext,
        state: LoopState,
        host: Host,
        position: ScriptPosition,
        data: OwnLoader | None = None,
        *,
        in_pieces: bool = True,
        share: float = 1.0,
    ) -> None:
        """``data``: the script's loader; given later if it is not known yet. ``in_pieces``: a part that has grown is made again in
        pieces of its former size. ``share``: of a batch in the mean over its step."""
        self.job = job
        self.state = state
        self.position = position
        self.data = data
        self.drawn: Sequence[GlobalBatch] = ()  # the batches of the present epoch
        self.open_batches: list[OpenBatch] = []  # given since the last step
        self.share = share
        self.is_reduced = False  # the gradients of the open batches are everybody's
        self.is_torn = False  # the open batches were divided anew; what the script makes is not of its present part
        self.agreements = Agreements(self, position.answers)
        self._host = host
        self._ended_epoch = -1  # the last epoch of which this worker has made the last step
        self._in_pieces = in_pieces
        self._least = least_samples([state.model])

    @property
    def is_catching_up(self) -> bool:
        """Another worker's state has come; until the script is there, what it does has no effect."""
        return self.state.waits

    # -- worlds --

    def join(self) -> None:
        """Be in a world, at its state."""
        self._change(lambda: self.job.join(self.state))

    def commit(self, epoch: int) -> bool:
        """Between two steps, before a batch of this epoch: the world may change. False: it has."""
        while self.state.progress.epoch < epoch:
            self.job.epoch_ended()
        if self.job.under_master:
            self.job.sigterm.listen()  # the script may have set a handler of its own
        try:
            self.job.commit()
            return True
        except WorldChanged as change:
            self.leave(change)
            return False

    def leave(self, why: WorldChanged | WorldBroken) -> None:
        """Leave this world for the next one, which is this worker's when this returns."""
        self._change(lambda: self.job.change_world(self.state, why))

    def arrive(self) -> None:
        """The script stands where the job stands: what it has done since another's state came is undone."""
        self.state.arrive()
        self.is_reduced = self.is_torn = False
        self.open_batches.clear()
        self._host.arrived()
        self._host.rank_known()

    def end(self) -> bool:
        """The script is done: return when the scripts of all workers are. False: this worker was told to leave."""
        self.job.advance(Activity.END)
        if self._ends_as_told():
            return False
        try:
            if self.is_reduced:
                self.job.commit()
                self.close()
        except WorldChanged as change:
            log.info("%s", change)  # which is part of ending
        try:
            self.job.end(self.state, self._host.world_at_end)
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
            self._host.left()
            return False
        if self._ended_epoch == self.state.progress.epoch:
            self.job.epoch_ended()
        return True

    # -- batches --

    def begin_epoch(self, epoch: int, draw: Callable[[int], Sequence[GlobalBatch]] | None = None) -> None:
        """Draw the order of this epoch: as the others have drawn it, if they have. ``draw``: does so; None: `OwnLoader.of_epoch`."""
        assert self.data is not None, "there is a loader"
        self.position.put_back(epoch, self.data.draws)
        self.position.note_streams(epoch, self.data.draws, since=self.state.progress.epoch)
        self.drawn = (draw or self.data.of_epoch)(epoch)

    def batches(self, first: int = 0) -> Iterator[Any]:
        """What the script is given from batch ``first`` of the epoch on: this worker's part of each batch.

        A worker that is catching up is given a stand-in for each batch that the job has trained on.
        """
        assert self.data is not None, "there is a loader"
        number = first
        parts = PartsAhead(self.data, self.drawn, self.part_of)
        stand_in: StandIn | None = None
        while (number := self._host.next_number(number)) < len(self.drawn):
            if not self.begins(self.drawn[number]):
                stand_in = stand_in or self.data.stand_in(self.drawn[number], self.job.most_workers)
                yield stand_in.take()
            else:
                batch = self.drawn[number]
                with self._host.loading(batch):
                    sample = parts.take(number, self.job.world)
                self.give(batch, sample)
                yield sample
            number += 1

    def begins(self, batch: GlobalBatch) -> bool:
        """Whether the script is to be given its part of this batch next. If not, it is given a stand-in. The world may change here."""
        self.job.advance(Activity.DATA)
        self.state.attributes.begin()
        if self._host.asks_for(batch) or self.is_reduced:  # a GradScaler may have left a step out
            self.close()
        while not self.open_batches:
            at = self.state.progress
            if self.is_catching_up and batch.start < (at.epoch, at.position):
                if self.may_pass_by():
                    self._host.passed_by(batch)
                    return False
                continue
            if self.is_catching_up:
                self.arrive()
            self._host.stands_before(batch)
            if self.commit(batch.epoch):
                break
        return True

    def may_pass_by(self) -> bool:
        """Whether this worker, which is catching up, goes on to where the others wait. If not, it is in another world now, or its process ends."""
        if not self.job.is_told_to_leave and not self.job.world_is_broken:
            return True
        what = "the world broke" if self.job.world_is_broken else "this worker was told to leave"
        self.leave(WorldBroken(f"{what} while it was on its way to where the job stands"))
        return False

    def give(self, batch: GlobalBatch, sample: Any) -> None:
        """The script goes on with this sample, its part of a batch."""
        if not self.open_batches:
            self.state.begin_step()
            self.position.answers.begin_step(self.state.step + 1)
        self.state.reducer.begin_passes()
        given = self._host.opened(batch, self.part_of(batch), sample)
        given.most = len(given.part.indices)
        if self.job.spread.parts > 1:  # as many pieces in each process of a worker
            place, parts = self.job.spread.place(self.job.world.rank, self.job.world.size)
            given.most = self.divide(batch, parts).largest(place, self.job.spread.parts)
        self.open_batches.append(given)
        self.job.advance(Activity.COMPUTE)

    def divide(self, batch: GlobalBatch, workers: int) -> BatchPlan:
        return batch.plan(workers, self._least, self.position.seed_of(batch.epoch))

    def part_of(self, batch: GlobalBatch) -> MicroBatch:
        world, seed = self.job.world, self.position.seed_of(batch.epoch)
        if self._part is None or self._part[0] is not batch or self._part[1] is not world or self._part[2] != seed:
            place, parts = self.job.spread.place(world.rank, world.size)
            self._part = batch, world, seed, self.divide(batch, parts).whole_run(place)
        return self._part[3]

    @contextlib.contextmanager
    def apart(self, batch: GlobalBatch, purpose: bytes = b"") -> Iterator[None]:
        """Within, what is drawn is this worker's own, as of `seed`; the script's streams are as before afterwards."""
        with streams_apart():
            self.seed(batch, purpose)
            yield

    def seed(self, batch: GlobalBatch, purpose: bytes = b"") -> None:
        """Of what is drawn from here on: the same when this part is made again, by whichever worker. ``purpose``: unless it loads the batch."""
        seed = zlib.crc32(purpose, self.position.seed_of(batch.epoch))
        seed_generators(step_seed(seed, batch.number, self.part_of(batch).first))

    # -- a step --

    def backward(
        self,
        given: OpenBatch,
        weight: float,
        loss: torch.Tensor,
        run: Callable[[float], None],
        *,
        scale: float = 1.0,
        last: bool | None = None,
    ) -> None:
        """As much of the gradient of the mean over a global batch as comes from a part of this weight.

        ``run``: makes the gradients of ``loss`` times the factor that it is given. ``scale``: by which the loss was multiplied for the sake
        of small gradients. ``last``: it is the step's last pass, within which sums begin; None: it is, if it was in the steps before.
        """
        weight *= self.share
        self.state.reducer.weighed.look(loss, len(given.part.indices), is_scaled=scale != 1.0)
        given.add_loss(loss, weight / scale)
        # FSDP makes the mean over the processes of a worker, and here it is the sum.
        self.state.reducer.backward(
            lambda: run(weight * self.job.spread.parts), last=last if not self.is_torn else False
        )

    def settle(self, failure: WorldBroken | None = None) -> Outcome:
        """Unless that is done, sum the gradients of all workers, in whatever world that is possible.

        ``failure``: of a collective before, by which the step is torn already.
        """
        while not self.is_reduced and not self.is_catching_up:
            try:
                if failure is not None:
                    self.tear(failure)
                    failure = None
                if self.is_torn:
                    self._mend()
                if self.is_catching_up or not self.open_batches:
                    break
                self._sum()
            except WorldBroken as error:
                failure = error
        behind = Outcome.BEHIND if self.is_catching_up else Outcome.DROPPED
        return Outcome.MADE if self.is_reduced else behind

    def close(self) -> None:
        """The parameters have changed, or stay as they are for good: the next batch begins a step."""
        self._host.step_over()
        for given in self.open_batches:
            given.forget()
        # A script that was told to leave within the step may end for that reason, although the epoch is over.
        ends = self.open_batches and self.open_batches[-1].batch.is_last
        if ends and not self.job.inside.any(self.job.sigterm.came):
            self._ended_epoch = self.open_batches[-1].batch.epoch
        self.open_batches.clear()
        self.is_reduced = self.is_torn = False
        self.position.answers.close_step()

    # -- a step that is torn --

    def tear(self, failure: WorldBroken) -> None:
        """Be in another world, in which the open batches are divided anew."""
        self.state.reducer.reset_buffers()
        with self._as_before_step():  # others may be sent the state, and in the next world it is saved
            self.leave(failure)
            self.is_torn = not self.is_catching_up
        if self.is_catching_up:
            self.open_batches.clear()

    @contextlib.contextmanager
    def _as_before_step(self) -> Iterator[None]:
        """Within, attributes are as they were when the script had made nothing of the open batches. Afterwards they are as it has left them."""
        attributes, noted = self.state.attributes, self.open_batches[0].noted if self.open_batches else None
        with self._host.as_before_step():
            counted = attributes.note() if noted is not None else None
            if noted is not None:
                attributes.put_back(noted)
            yield
            if counted is not None and not self.is_catching_up:
                attributes.put_back(counted)

    def drop(self, error: Exception) -> None:
        """The step can't be made again of what the script has done."""
        first, last = self.open_batches[0], self.open_batches[-1]
        self.open_batches.clear()
        self.is_torn = False
        self.state.reducer.drop_gradients()
        self._host.cannot_remake(first, last, error)

    @streams_apart()
    def remake(self) -> None:
        """Make the gradients of the open batches, of this worker's present part. Random streams are as before afterwards."""
        divided = [(given, self.sub_batches(given)) for given in self.open_batches]
        self._host.begin_remake(divided)
        # A training step that is begun again as a whole was not made to its end before: what it counts is counted now.
        counted = self.state.attributes.note() if self._in_pieces else None
        try:
            for given, samples in divided:
                self.job.advance(Activity.ALIVE)
                self.seed(given.batch)
                with self.state.as_one_pass(len(samples)) as made:
                    for sample in samples:
                        if given.noted is not None:
                            self.state.attributes.put_back(given.noted)
                        self._host.remake(given, sample.content, sample.weight)
                        made(sample.samples / (given.part.samples or 1))
        finally:
            if counted is not None:
                self.state.attributes.put_back(counted)

    def sub_batches(self, given: OpenBatch) -> list[SubBatch]:
        """This worker's part in the present world, loaded anew."""
        assert self.data is not None, "a batch was loaded"
        given.part = part = self.part_of(given.batch)
        given.begin_again()
        seed_generators(part.seed)
        runs: Sequence[MicroBatch] = [part]
        world = self.job.world
        place, parts = self.job.spread.place(world.rank, world.size)
        if self._in_pieces and self.job.inside.size > 1:
            runs = self.divide(given.batch, parts).alike(place, self.job.spread.parts, given.most)
        elif self._in_pieces and part.samples:  # a worker without a sample makes a pass that counts for nothing
            runs = self.divide(given.batch, parts).mine(place, given.most, self._least)
        return [SubBatch(self.data.load_at_once(each.indices), each.weight, each.samples) for each in runs]

    # -- details --

    def _sum(self) -> None:
        plan = plan_of(self.open_batches, self.state.progress)
        self.job.begin(plan)
        samples = sum(given.part.samples for given in self.open_batches)
        objective = sum(given.objective for given in self.open_batches)
        sums = self.state.sum(plan, objective, samples, self._host.rides())
        if not sums.vote.ended:
            self._host.heard(sums.rides)
        self.state.agreed(sums)
        self.is_reduced, self.is_torn = True, False

    def _begin_again(self) -> None:
        self.state.reducer.reset_buffers()  # the script may have gone on
        # Newcomers begin the step so, with which this worker is compared.
        with self._as_before_step():
            self.state.begin_step()
        self.state.reducer.drop_gradients()

    def _mend(self) -> None:
        """Have gradients of the open batches, of this worker's present part.

        Raises:
            WorldBroken: of the present world.
        """
        self._begin_again()
        try:
            self.remake()
        except WorldBroken:
            raise
        except Exception as error:  # noqa: BLE001  whatever the script's functions say of other samples
            self.drop(error)

    def _ends_as_told(self) -> bool:
        """Whether this worker was told to leave, for which reason its script may have ended: then it leaves, and the others go on.

        Told behind the last step, as in a last evaluation, it ends with the job.
        """
        at = self.state.progress
        is_early = at.position > 0 and self._ended_epoch != at.epoch
        if not self.job.is_told_to_leave:
            if not (self.job.inside.any(self.job.sigterm.came) and is_early):
                return False
            # It does not wait for another to take its state.
            self.job.session.post(p.Ordered(m.Drain("told to leave (SIGTERM)")))
        try:
            self.job.change_world(self.state, WorldBroken("the script has ended, as this worker was told to leave"))
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
        self._host.left()
        return True

    def _change(self, enter: Callable[[], None]) -> None:
        """Be in another world."""
        try:
            enter()
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
            self._host.left()
            sys.exit(0)
        self._host.rank_known()


class JoinedHost(Host):
    """A host that has its participant, once the front end has made that. It must have `remake`."""

    def __init__(self, job: ElasticContext, on_left: Callable[[], None]) -> None:
        """``on_left``: this worker leaves for good; see `ScriptRuntime.leave`."""
        self.job = job
        self._on_left = on_left
        self._joined: Participant | None = None

    @property
    def participant(self) -> Participant:
        assert self._joined is not None, "training has begun"
        return self._joined

    @property
    def is_catching_up(self) -> bool:
        """The trainer is on its way to where the job stands."""
        return self._joined is not None and self._joined.is_catching_up

    @property
    def is_first(self) -> bool:
        """Whether this worker writes files and prints: true on one, and never on one whose state is another's yet."""
        return self.job.known_rank == 0 and not self.is_catching_up

    def finish(self) -> LoopState | None:
        """Return when the scripts of all workers are done; the state that they end with, if there is one."""
        participant = self._joined
        if participant is None:
            return None
        if participant.is_catching_up:
            participant.arrive()
        return participant.state if participant.end() else None

    def left(self) -> None:
        self._on_left()


# The hosts of trainers whose loop can begin anywhere: it passes by what the job has done, and goes on from there.

# Where a job stands that has no further step.
NO_EPOCH = 2**31


class TrainerPlace(Piece):
    """Where a trainer stands between two steps: its next batch, the random streams, and numbers of its own.

    What is received waits until the trainer stands there, as it may be in the middle of a step. A torn step is made again in place: nothing
    has to be undone.
    """

    name = "trainer"
    is_value = True
    shows_the_way = True

    def __init__(self) -> None:
        self.received: dict[str, Any] | None = None
        self.epoch = self.batch = 0  # the number of the next batch in its epoch
        self.outside = b""  # random streams, as the script knows them outside of batches

    @abstractmethod
    def read(self) -> dict[str, Any]:
        """The trainer's numbers, as they were when `note` was called; this may be in the middle of the step after it."""

    @abstractmethod
    def apply(self, numbers: dict[str, Any]) -> None:
        """Set those that `read` has given, on another worker perhaps."""

    def note(self, epoch: int, batch: int) -> None:
        """The trainer is between two steps."""
        self.epoch, self.batch = epoch, batch

    def arrive(self) -> None:
        """The trainer stands where the job stands."""
        content, self.received = self.received, None
        assert content is not None, "a place was received"
        self.apply(content)
        self.outside = content["outside"]
        self.note(content["epoch"], content["batch"])

    # -- as a piece of the training state --

    def keep(self) -> None: ...

    def undo(self) -> None: ...

    def dump(self) -> dict[str, Any]:
        outside = self.outside or RandomStreams.capture()
        return {"epoch": self.epoch, "batch": self.batch, **self.read(), "outside": outside}

    def load(self, dumped: dict[str, Any]) -> None:
        self.received = dumped


class MovableHost(JoinedHost):
    """A host that is called where the trainer's loop comes to an epoch (`go_to`), asks for its batches (`take`), and ends (`end_of_training`)."""

    def __init__(self, job: ElasticContext, on_left: Callable[[], None], place: TrainerPlace) -> None:
        """``place``: is among the values of the training state."""
        super().__init__(job, on_left)
        self._place = place
        self._begins = (0, 0)  # the present epoch, and the number of the batch that it is begun with

    def join(self, participant: Participant) -> None:
        """Be in a world. On rank 0 of the first one, which has its own state, the trainer stands where the job stands."""
        self._joined = participant
        self._place.outside = RandomStreams.capture()
        participant.join()

    def go_to(self, epoch: int, first: int = 0) -> int | None:
        """The number of the batch to begin this epoch with, which is ``first`` unless the job stands elsewhere; None: not in this epoch."""
        participant, received = self.participant, self._place.received
        participant.close()  # a callback may have ended the last epoch in the middle of a step
        if received is not None:
            if epoch < received["epoch"]:
                return None
            participant.arrive()
            first = received["batch"]
        self._begins = epoch, first
        return first

    def take(self, draw: Callable[[int], Sequence[GlobalBatch]] | None = None) -> Iterator[Any]:
        """The batches of the epoch that `go_to` was called for, each as this worker's part of it. ``draw``: the order, as `Participant.begin_epoch`."""
        participant, (epoch, first) = self.participant, self._begins
        participant.begin_epoch(epoch, draw)
        if first and (self._place.epoch, self._place.batch) == self._begins:
            # It has come within the epoch, and has drawn the order once more.
            RandomStreams.restore(self._place.outside)
        return participant.batches(first)

    def end_of_training(self) -> None:
        """There is no further step."""
        if self.is_catching_up:
            self.participant.arrive()
        self._place.note(NO_EPOCH, 0)
        self.participant.state.last_step_made()

    # -- for the participant --

    def next_number(self, number: int) -> int:
        # Who is behind in the job's last step has no batch more to make.
        received = self._place.received
        return number if received is None or received["epoch"] < NO_EPOCH else len(self.participant.drawn)

    def stands_before(self, batch: GlobalBatch) -> None:
        # A step of one worker is not torn: its state is sent from here alone, with the streams as they are then.
        self._place.outside = b"" if self.job.is_alone else RandomStreams.capture()
        self._place.note(batch.epoch, batch.number)

    def loading(self, batch: GlobalBatch) -> AbstractContextManager[None]:
        return self.participant.apart(batch)

    def arrived(self) -> None:
        self._place.arrive()
        RandomStreams.restore(self._place.outside)
