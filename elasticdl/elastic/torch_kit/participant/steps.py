"""The steps that a worker makes of the batches in its hand, in whatever world it is.

For control flow that does not notice other workers: a plain loop, or a trainer that somebody else has written. The world changes
between two steps; or in the middle of one that a lost worker has torn. The batches of that step are then divided anew, and
the gradients are made again, from the same parameters.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn, Protocol

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.batch_plan import split
from elasticdl.elastic.core.errors import Stopped, WorldBroken, WorldChanged
from elasticdl.elastic.core.progress import step_seed
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch_kit.data.loaders import seed_step
from elasticdl.elastic.torch_kit.data.parts import GlobalBatch, Part
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState, OpenBatch, ScriptPosition, plan_of
from elasticdl.elastic.torch_kit.pieces.groups import groups_are_there
from elasticdl.elastic.torch_kit.reduction.buffers import least_samples
from elasticdl.elastic.torch_kit.reduction.hooks import EVERYBODY
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Samples of a batch as the script's loader gives them; ``weight``: their part of the mean over the batch."""

    content: Any
    weight: float
    samples: int


class Script(Protocol):
    """What trains: it is given batches, and makes gradients of them."""

    def take_back(self) -> None:
        """A step is torn: what has been changed in place for it is as before. Others may be sent the state then."""

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        """A step is torn: these batches, of which this worker has these samples now, are to be made again."""

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        """Add the gradients of ``sample``, a piece of a batch, as `Steps.weighed_backward` does with this weight.

        Raises:
            WorldBroken: the step is torn again.
        """

    def give_back(self) -> None:
        """The step was made again, here or by others: what `take_back` has taken back is as the script has left it."""

    def cannot_remake(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        """A step with these batches is torn, and `remake` has raised this. Unless this raises, the step is dropped here."""


class Steps:
    """A worker's part in the steps of a job, from batches given to gradients that are everybody's."""

    def __init__(
        self,
        job: ElasticContext,
        state: LoopState,
        load: Callable[[Sequence[Any]], Any],
        script: Script,
        on_left: Callable[[], None],
        place: ScriptPosition,
        *,
        in_pieces: bool = True,
        share: float = 1.0,
    ) -> None:
        """``load``: samples of these indices, as a batch of the loader's. ``on_left``: this worker leaves for good; its process
        ends then, with status 0. ``in_pieces``: a part that has grown is made again in pieces of its former size. ``share``: of a
        batch in the mean over its step."""
        self.job = job
        self.state = state
        self.place = place
        self.open_batches: list[OpenBatch] = []  # since the last step
        self.share = share
        self.is_reduced = False
        self.is_torn = (
            False  # the batches in hand were divided anew, and what the script makes is not of its present part
        )
        self.is_catching_up = (
            False  # another worker's state has come, and what the script does has no effect until it stands there
        )
        self._on_the_way = contextlib.ExitStack()  # while this worker is behind
        self._ended_epoch = -1  # the last one of which this worker has made the last step
        self._load = load
        self._script = script
        self._on_left = on_left
        self._in_pieces = in_pieces
        self._least = least_samples([state.model])

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
        self.state.attributes.begin()
        try:
            self.job.commit()
            return True
        except WorldChanged as change:
            self.leave(change)
            return False

    def leave(self, why: WorldChanged | WorldBroken) -> None:
        """For the next world; it is this worker's when this returns."""
        if self.is_catching_up:  # others may be sent what this worker was sent
            self.state.go_back()
        self._change(lambda: self.job.change_world(self.state, why))

    def may_pass_by(self) -> bool:
        """Whether this worker, which is behind, goes on to where the job stands, where the others wait for it. If not, it is in
        another world now; or its process ends, as it is to leave."""
        if not self.job.is_told_to_leave and not self.job.world_is_broken:
            return True
        what = "the world broke" if self.job.world_is_broken else "this worker was told to leave"
        self.leave(WorldBroken(f"{what} while it was on its way to where the job stands"))
        return False

    def arrive(self, epoch: int | None = None) -> None:
        """The script stands where the job stands: what it has done since another's state came is undone. ``epoch``: in which it
        stands, if that has begun."""
        if self.state.batches is not None and epoch in self.place.draws:
            self.state.batches.draws.require_data(self.place.draws[epoch])
        self._on_the_way.close()
        self.state.arrive()
        self.is_catching_up = self.is_reduced = self.is_torn = False
        self.open_batches.clear()

    def end(self) -> bool:
        """The script is done: return when those of all workers are. False: this worker was told to leave."""
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
            self._on_left()
            return False
        if self._ended_epoch == self.state.progress.epoch:
            self.job.epoch_ended()
        return True

    def _ends_as_told(self) -> bool:
        """Whether this worker was told to leave, and its script has ended for that reason; then it leaves. The others go on."""
        at, session = self.state.progress, self.job.session
        is_early = at.position > 0 and self._ended_epoch != at.epoch
        if not self.job.is_told_to_leave:
            if not (self.job.under_master and self.job.sigterm.came and is_early):
                return False
            session.post(p.DrainOrdered("told to leave (SIGTERM)"))  # it does not wait for another to take its state
        try:
            self.job.change_world(self.state, WorldBroken("the script has ended, as this worker was told to leave"))
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
        self._on_left()
        return True

    # -- a step --

    def part_of(self, batch: GlobalBatch) -> Part:
        return Part.of(batch, self.job.world.rank, self.job.world.size, self._least)

    def seed(self, batch: GlobalBatch) -> None:
        """For what is drawn from here to the next batch: the same when it is made again by a worker of this rank."""
        seed_step(self._seed_of(batch.epoch), batch.number, self.job.world.rank)

    def seed_of_processes(self, batch: GlobalBatch) -> int:
        """For what is drawn by those that load this batch and the next ones."""
        return step_seed(self._seed_of(batch.epoch), batch.number, self.job.world.rank)

    def _seed_of(self, epoch: int) -> int:
        if epoch not in self.place.streams:
            raise UserError(
                f"the script goes on in epoch {epoch + 1}, where the job does not stand: it has swallowed an error before, as by `except Exception`"
            )
        return zlib.crc32(self.place.streams[epoch])

    def common_seed(self) -> int:
        """Of what all workers draw alike in this step."""
        return step_seed(zlib.crc32(self.place.streams[self.open_batches[0].batch.epoch]), self.state.step, EVERYBODY)

    def give(self, given: OpenBatch) -> None:
        """The script goes on with this batch."""
        if not self.open_batches:
            self.state.begin_step()
            self.place.answers.begin_step(self.state.step + 1)
        given.most = len(given.part.indices)
        self.open_batches.append(given)
        self.job.advance(Activity.COMPUTE)

    def weighed_backward(
        self, given: OpenBatch, weight: float, loss: torch.Tensor, kwargs: dict[str, Any], scale: float
    ) -> None:
        """As much of the gradient of the mean over a global batch as comes from a part of this weight.

        ``kwargs``: of ``loss.backward``. ``scale``: by which the loss was multiplied for the sake of small gradients.
        """
        weight *= self.share  # also where it is made again
        given.objective = given.objective + loss.detach().sum().float() * (weight / scale)
        if weight != 1.0:
            gradient = kwargs.get("gradient")
            kwargs = {**kwargs, "gradient": torch.ones_like(loss) * weight if gradient is None else gradient * weight}
        with self.state.hooks.aside():
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def reduce(self, failure: WorldBroken | None = None, *, larger: float = 1.0) -> None:
        """Unless that is done, sum the gradients of all workers, in whatever world that is possible.

        ``failure``: of a collective before, by which the step is torn already. ``larger``: the loss is too small by this. Afterwards the gradients are there; or
        `is_behind` holds: the others have made this step; or the step was dropped, and the hand is empty.
        """
        while not self.is_reduced and not self.is_catching_up:
            try:
                if failure is not None:
                    self._tear(failure)
                    failure = None
                if self.is_torn:
                    self._mend()
                if self.is_catching_up or not self.open_batches:
                    return
                samples = sum(given.part.samples for given in self.open_batches)
                objective = sum((given.objective for given in self.open_batches), torch.zeros(()))
                self.state.reduce(plan_of(self.open_batches, self.state.progress), objective * larger, samples)
                self.is_reduced, self.is_torn = True, False
                self.state.hooks.require_one_pass(
                    sum(max(1, given.backwards) for given in self.open_batches), self.job.warn
                )
                self.state.hooks.call(self.common_seed)
            except WorldBroken as error:
                failure = error

    def ask(self, tell: Callable[[], Any], *, mends: bool = True) -> Any | None:
        """What all workers tell each other with batches in hand, before these are reduced: the same on all, whatever becomes of the world.

        ``tell``: this worker's part in it, a collective, in the present world. None: the step was dropped, or others have made it.

        Raises:
            WorldBroken: not ``mends``; it is asked again when the step is made again.
        """
        answers = self.place.answers
        number = answers.ask()
        while not answers.known(number):
            try:
                answers.add(tell())
            except WorldBroken as failure:
                if not mends:
                    raise
                self._tear(failure)
            except Exception as error:
                if not self.is_torn:
                    raise
                self._drop(error)
            if self.is_catching_up or not self.open_batches:
                return None
        return answers[number]

    def close(self) -> None:
        """The parameters have changed, or stay as they are for good: the next batch begins a step."""
        for given in self.open_batches:
            given.forget()
        if self.open_batches and self.open_batches[-1].batch.is_last:
            self._ended_epoch = self.open_batches[-1].batch.epoch
        self.open_batches.clear()
        self.is_reduced = self.is_torn = False
        self.place.answers.close_step()

    # -- details --

    def _tear(self, failure: WorldBroken) -> None:
        """Be in another world, in which the batches in hand are divided anew."""
        self.state.reset_buffers()
        self._script.take_back()
        self.leave(failure)
        self.is_torn = not self.is_catching_up
        if self.is_catching_up:
            self.open_batches.clear()
        self._script.give_back()

    def _mend(self) -> None:
        """Have gradients of the batches in hand, of this worker's present part; see `reduce`.

        Raises:
            WorldBroken: of the present world.
        """
        self.state.reset_buffers()  # the script may have gone on
        self._script.take_back()
        self.state.begin_step()
        self.state.drop_gradients()
        try:
            self.remake()
            self._script.give_back()
        except WorldBroken:
            raise
        except Exception as error:  # noqa: BLE001  whatever the script's functions say of other samples
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """The step in hand can't be made of what the script has done."""
        first, last = self.open_batches[0], self.open_batches[-1]
        self.open_batches.clear()
        self.is_torn = False
        self.state.drop_gradients()
        self._script.cannot_remake(first, last, error)

    def remake(self) -> None:
        """Gradients of the batches in hand, of this worker's present part."""
        pieces = [(given, self.pieces(given)) for given in self.open_batches]
        self._script.begin_remake(pieces)
        # A training step that is begun again as a whole was not made to its end before: what it counts is counted now.
        counted = self.state.attributes.note() if self._in_pieces else None
        try:
            for given, samples in pieces:
                self.job.advance(Activity.ALIVE)
                self.seed(given.batch)
                with self.state.as_one_pass(len(samples)) as made:
                    for sample in samples:
                        if given.noted is not None:
                            self.state.attributes.put_back(given.noted, since=counted)
                        self._script.remake(given, sample.content, sample.weight)
                        made(sample.samples, sample.samples / (given.part.samples or 1))
        finally:
            if counted is not None:
                self.state.attributes.put_back(counted)

    def pieces(self, given: OpenBatch) -> list[SubBatch]:
        """This worker's part in the present world, loaded anew."""
        given.part = part = self.part_of(given.batch)
        given.objective = torch.zeros(())
        given.remade.clear()
        self.seed(given.batch)
        if not (self._in_pieces and part.samples):  # a worker without a sample makes a pass that counts for nothing
            return [SubBatch(self._load(part.indices), part.weight, part.samples)]
        pieces = max(1, min(-(-part.samples // given.most), part.samples // self._least))
        ends = list(accumulate(split(part.samples, pieces), initial=0))
        every = [part.indices[start:end] for start, end in pairwise(ends)]
        whole = len(given.batch.indices)
        return [SubBatch(self._load(indices), len(indices) / whole, len(indices)) for indices in every]

    def _change(self, enter: Callable[[], None]) -> None:
        """Be in another world."""
        self.state.was_loaded = False
        try:
            enter()
        except Stopped as stopped:
            self._end_process(stopped)
        if self.state.was_loaded and not self.is_catching_up:
            self._on_the_way.enter_context(groups_are_there(self.state.optimizer))
        self.is_catching_up = self.is_catching_up or self.state.was_loaded

    def _end_process(self, stopped: Stopped) -> NoReturn:
        log.info("leaving: %s", stopped.reason)
        self._on_left()
        sys.exit(0)
