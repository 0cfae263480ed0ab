"""A worker's part in a loop that somebody else has written: a plain loop, or a trainer.

The loop believes that it is alone and has the global batch. It is given its part of each batch; the gradients of all workers are
summed before it looks at them. The world changes between two steps, or in the middle of a step that a lost worker has torn.
The batches of a torn step are divided anew, and their gradients are made again, from the same parameters.

With it what a front end adds: its `Host`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OwnCursor, OwnLoader, StandIn
from elasticdl.elastic.torch_kit.passes import least_samples
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.tensors import ElasticContext, HostCopy, seed_generators, streams_apart
from elasticdl.elastic.training.attributes import Noted
from elasticdl.job import messages as m

log = logging.getLogger(__name__)

# What a front end adds, and what it is given.


class Outcome(Enum):
    """What becomes of the open batches."""

    MADE = "the gradients are everybody's; the parameters may change"
    BEHIND = "the other workers have made this step; this worker is on its way to where they are"
    DROPPED = "the script must be given these batches again"


def _contents(tensor: torch.Tensor) -> tuple[int, int]:
    """As long as the tensor is kept, these differ from those of any other, and after a change in place."""
    return tensor.data_ptr(), tensor._version


@dataclass(slots=True)
class OpenBatch:
    """A batch that the script has been given, of whose step the parameters have not changed yet."""

    batch: GlobalBatch
    part: MicroBatch
    sample: Any = None
    backwards: int = 0  # backward passes that were made of it
    most: int = 0  # samples of the part when it was given, which are those of one pass
    noted: Noted | None = None  # in attributes, before the script has made anything of it
    losses: list[tuple[HostCopy, float]] = field(default_factory=list)  # of its passes, and how each is weighed
    begun: tuple[tuple[int, int], HostCopy] | None = None  # of the pass that is being made: which loss, and its copy

    def begin_loss(self, loss: torch.Tensor) -> None:
        """A pass is made of this loss next. It comes to the host while the device is on that pass, which nobody has to wait for."""
        self.begun = _contents(loss), HostCopy(loss.detach().sum())

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """A pass was made, or is made next, of this loss."""
        of, copy = self.begun or (None, None)
        self.begun = None
        if copy is None or of != _contents(loss):
            copy = HostCopy(loss.detach().sum())
        self.losses.append((copy, weight))

    @property
    def objective(self) -> float:
        """The weighed sum of the losses of its passes."""
        return sum(float(copy.wait()) * weight for copy, weight in self.losses)

    def begin_again(self) -> None:
        """Its gradients are made again, of another part."""
        self.losses.clear()

    def forget(self) -> None:
        """Its step is made: what the script has computed of it may go."""
        self.sample = None


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Samples of a batch as the script's loader gives them; ``weight``: their part of the mean over the batch."""

    content: Any
    weight: float
    samples: int


def plan_of(open_batches: Sequence[OpenBatch], progress: Progress) -> StepPlan:
    """The step on these batches."""
    first, last = open_batches[0].batch, open_batches[-1].batch
    whole = last.indices if first is last else [index for given in open_batches for index in given.batch.indices]
    after = Progress(last.epoch, last.end, progress.step + 1, progress.samples + len(whole))
    parts = tuple(given.part for given in open_batches)
    return StepPlan(first.epoch, progress.step + 1, len(whole), after, parts, last.is_last, whole)


class Host:
    """A front end, as its participant sees it. It must have `left` and `remake`; the other methods have a default.

    What a front end calls, in this order; docs/worker_side.md says more, under "A trainer of another library":

    - `ScriptRuntime.init_in_place`, and `train_in_place` with `JoinedHost.finish` (`elasticdl.elastic.training.runtime`; the process's own is
      `elasticdl.elastic.torch_kit.tensors.own`).
    - `Participant.join`; the `ScriptPosition` is the value ``place`` of the `LoopState`. Where another's state has come by that, the worker is catching up.
    - For each epoch `Participant.begin_epoch` and `Participant.batches`. A loop that passes by what is done calls `Participant.arrive` before
      them (`elasticdl.elastic.torch_kit.movable_host.MovableHost`). One that catches up by stand-ins draws as the others have drawn.
    - For each pass `Participant.backward`; before gradients are looked at, `Participant.settle`; after the update `Participant.close`.
      While it is catching up, none of these, and no update.
    - After the last step `LoopState.last_step_made`.

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

    def arrives(self, batch: GlobalBatch | None) -> None:
        """This worker stands where the job stands; the job's state takes effect next. ``batch``: the next one, if it is within an epoch."""

    def arrived(self, batch: GlobalBatch | None) -> None:
        """It has the job's state."""

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

    _part: tuple[tuple[GlobalBatch, World, int], MicroBatch] | None = None  # that was asked for last

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

    def arrive(self, batch: GlobalBatch | None = None) -> None:
        """The script stands where the job stands: what it has done since another's state came is undone.

        ``batch``: the next one, if the script is within an epoch.
        """
        self._host.arrives(batch)
        self.state.arrive()
        self.is_reduced = self.is_torn = False
        self.open_batches.clear()
        self._host.arrived(batch)
        self._host.rank_known()

    def end(self) -> bool:
        """The script is done: return when the scripts of all workers are. False: this worker was told to leave."""
        if self._ends_as_told():
            return False
        try:
            if self.is_reduced:
                self.job.commit()
                self.close()
        except WorldChanged as change:
            log.info("%s", change)  # which is part of ending
        try:
            self.job.end(self.state)
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
        cursor = OwnCursor(self.data, self.drawn, self.part_of)
        stand_in: StandIn | None = None
        while (number := self._host.next_number(number)) < len(self.drawn):
            if not self.begins(self.drawn[number]):
                stand_in = stand_in or self.data.stand_in(self.drawn[number], self.job.most_workers)
                yield stand_in.take()
            else:
                batch = self.drawn[number]
                with self._host.loading(batch):
                    sample = cursor.take(number, self.job.world)
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
                self.arrive(batch)
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
        self.open_batches.append(given)
        self.job.advance(Activity.COMPUTE)

    def divide(self, batch: GlobalBatch, workers: int) -> BatchPlan:
        return batch.plan(workers, self._least, self.position.seed_of(batch.epoch))

    def part_of(self, batch: GlobalBatch) -> MicroBatch:
        of = (batch, self.job.world, self.position.seed_of(batch.epoch))
        if self._part is None or any(one is not other for one, other in zip(of, self._part[0], strict=True)):
            self._part = of, self.divide(batch, of[1].size).whole_run(of[1].rank)
        return self._part[1]

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
        self.state.reducer.backward(lambda: run(weight), last=last if not self.is_torn else False)

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
        if self.open_batches and self.open_batches[-1].batch.is_last:
            self._ended_epoch = self.open_batches[-1].batch.epoch
        self.open_batches.clear()
        self.is_reduced = self.is_torn = False
        self.position.answers.close_step()

    # -- a step that is torn --

    def tear(self, failure: WorldBroken) -> None:
        """Be in another world, in which the open batches are divided anew."""
        self.state.reducer.reset_buffers()
        with (
            self._host.as_before_step(),
            self._as_before_step(),
        ):  # others may be sent the state, and in the next world it is saved
            self.leave(failure)
            self.is_torn = not self.is_catching_up
        if self.is_catching_up:
            self.open_batches.clear()

    @contextlib.contextmanager
    def _as_before_step(self) -> Iterator[None]:
        """Within, attributes are as they were when the script had made nothing of the open batches. Afterwards they are as it has left them."""
        attributes, noted = self.state.attributes, self.open_batches[0].noted if self.open_batches else None
        if noted is None:
            yield
            return
        counted = attributes.note()
        attributes.put_back(noted)
        yield
        if not self.is_catching_up:
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
        if self._in_pieces and part.samples:  # a worker without a sample makes a pass that counts for nothing
            world = self.job.world
            runs = self.divide(given.batch, world.size).mine(world.rank, given.most, self._least)
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
        with self._host.as_before_step(), self._as_before_step():
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
        """Whether this worker was told to leave, and its script has ended for that reason; then it leaves. The others go on."""
        at, session = self.state.progress, self.job.session
        is_early = at.position > 0 and self._ended_epoch != at.epoch
        if not self.job.is_told_to_leave:
            if not (self.job.under_master and self.job.sigterm.came and is_early):
                return False
            session.post(
                p.Ordered(m.Drain("told to leave (SIGTERM)"))
            )  # it does not wait for another to take its state
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
