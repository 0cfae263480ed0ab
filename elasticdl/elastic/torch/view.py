"""A world of one whose batch is the global batch: what a script sees that knows nothing of other workers.

The script is given its loader's batches, of each of which this worker has a part; it calls ``backward`` and
``optimizer.step`` as on one device. Gradients are summed when it looks at them first, or steps. The world changes between two
steps, where the script asks for a batch; or in the middle of one that a lost worker has torn, whose batches are then divided
anew. The script's control flow notices neither.

A worker that comes later runs the same script from its top. It is given a stand-in for each batch that the job has trained
on already, and what it makes of those has no effect; so its loops count as those of the others have counted. Then its state
is replaced by the job's.
"""

from __future__ import annotations

import functools
import logging
import sys
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.errors import Stopped, WorldBroken, WorldChanged
from elasticdl.elastic.torch.context import ElasticContext
from elasticdl.elastic.torch.parts import SAMPLES_OF_STAND_IN, Batches, GlobalBatch, Part, RandomStreams
from elasticdl.elastic.torch.sampler import seed_step
from elasticdl.elastic.torch.stand_in import ModelFromMemory
from elasticdl.elastic.torch.tape import Tape, Watch
from elasticdl.elastic.torch.view_state import Given, Place, ViewState, plan_of

log = logging.getLogger(__name__)


class View:
    """This worker's part in what the script does, between its loader and its optimizer."""

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        values: Callable[[], dict[str, Any]],
        on_left: Callable[[], None],
    ) -> None:
        """``values``: asked at the first batch for what else travels, by name. ``on_left``: this worker leaves for good."""
        self.batches = batches
        self.is_behind = False  # what the script does has no effect until it stands where the job stands
        self.repeats: GlobalBatch | None = None  # the script must be given this one again, and those after it
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._values = values
        self._on_left = on_left
        self._watch = Watch(model, self)
        self._from_memory = ModelFromMemory(model)
        self._place = Place()
        self._state: ViewState | None = None  # before the first batch
        self._epochs = 0  # begun by the script
        self._outside: bytes = b""  # random streams, as the script knows them outside its loop over batches
        self._hand: list[Given] = []  # given since the last step
        self._last: Given | None = None
        self._steps_loss: torch.Tensor | None = None  # of the last step, if it was made of one
        self._scalers: list[torch.amp.GradScaler] = []
        self._is_fresh = True  # no gradient was made of the batches in hand
        self._is_reduced = False
        self._zeroed = False  # by the script, since the last step
        self._skipped_means = 0  # that the others have made already

    @property
    def is_idle(self) -> bool:
        """What the script does at present has no effect."""
        return self.is_behind or self.repeats is not None

    # -- for the loader --

    def begin_repeating(self) -> int:
        """The number of the batch that the script is given next."""
        assert self.repeats is not None, "there are batches to repeat"
        number, self.repeats = self.repeats.number, None
        made = self._place.means
        self.state.go_back()
        self._skipped_means = made
        return number

    @property
    def state(self) -> ViewState:
        assert self._state is not None, "there is a state from the first batch on"
        return self._state

    def begin_epoch(self) -> list[GlobalBatch]:
        """The script begins to loop over its loader."""
        if self._state is None:
            self._place.streams = {0: RandomStreams.capture()}
            values = {**self._values(), "place": self._place}
            self._scalers = [each for each in values.values() if isinstance(each, torch.amp.GradScaler)]
            self._state = ViewState(self._job, self._model, self._optimizer, values)
            self._change(lambda: self._job.join(self.state))
        epoch, self._epochs = self._epochs, self._epochs + 1
        if not self.is_behind:
            first = self.state.progress.epoch
            kept = {number: streams for number, streams in self._place.streams.items() if number >= first}
            self._place.streams = {**kept, epoch: RandomStreams.capture()}
        elif epoch in self._place.streams:
            RandomStreams.restore(self._place.streams[epoch])
        if self.repeats:
            raise UserError("a step that was torn was made after the loop over its batches, which can't be given again")
        batches = self.batches.of_epoch(epoch)
        self._outside = RandomStreams.capture()
        return batches

    def end_epoch(self, epoch: int, samples: int) -> None:
        """There is no further batch in this epoch, of so many samples."""
        self.pause()
        at = self.state.progress
        if self.is_behind and (at.epoch, at.position) <= (epoch, samples):
            self._arrive()

    def pause(self) -> None:
        """The script leaves its loop over batches, or is between two of them."""
        self._watch.stop()
        RandomStreams.restore(self._outside)

    def may_give(self, batch: GlobalBatch) -> bool:
        """Whether the script is to be given its part of this batch next; if not, a stand-in. The world may change here."""
        self._watch.stop()
        self._job.advance(waiting=False)
        if self._is_reduced:  # a GradScaler has seen that gradients are not finite: the step is skipped
            self._close_step()
        while not self._hand:
            progress = self.state.progress
            if self.is_behind and batch.start < (progress.epoch, progress.position):
                if not self._job.session.core.broken:
                    self._from_memory.begin_batch()
                    return False
                self._leave(WorldBroken("the world broke while this worker was on its way to where the job stands"))
                continue
            if self.is_behind:
                self._arrive()
            while self.state.progress.epoch < batch.epoch:
                self._job.post(p.On.EPOCH_ENDED)
            try:
                self._job.post(p.On.COMMIT)
                break
            except WorldChanged as change:
                self._leave(change)
        return True

    def part_of(self, batch: GlobalBatch) -> Part:
        return Part.of(batch, self._job.world.rank, self._job.world.size)

    def seed(self, batch: GlobalBatch) -> None:
        """For what is drawn from here to the next batch: the same when it is made again by a worker of this rank."""
        seed_step(zlib.crc32(self._place.streams[batch.epoch]), batch.number, self._job.world.rank)

    def give(self, batch: GlobalBatch, part: Part, sample: Any) -> None:
        """The script goes on with this sample, its part of a batch."""
        if not self._hand:
            self.state.begin_step()
            self._place.means = 0
            self._is_fresh = True
        self._steps_loss = None
        self._last = Given(batch, part, sample, Tape(sample))
        self._hand.append(self._last)
        self._watch.start(self._last.tape)

    def stand_in(self, batch: GlobalBatch) -> Any:
        return self.batches.load_at_once(batch.indices[:SAMPLES_OF_STAND_IN])

    @property
    def world_version(self) -> int:
        return self._job.world.version

    # -- what the script does with a batch --

    def before_look(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter) and not self._is_fresh and not self._is_reduced:
            with self._watch.paused():
                self._reduce()

    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        given = self._last
        if self.is_idle:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        if not self._hand or given is None:
            raise UserError(
                "loss.backward() was called again after optimizer.step() on the same batch: expected one step for each batch, or "
                "for several"
            )
        if self._is_reduced:
            raise UserError(
                "gradients were looked at between two backward passes of one step, where they are not complete: look at them "
                "after the last"
            )
        if self._is_fresh:
            self._require_no_gradients()
            self._is_fresh = False
        given.tape.note_backward(loss, kwargs)
        given.backwards += 1
        given.loss = loss if given.backwards == 1 else None
        self._weighed_backward(given, given.part.weight, loss, kwargs)
        self._zeroed = False

    def zero_gradients(self, clear: Callable[[], None]) -> None:
        """The script clears the gradients, which ``clear`` does."""
        self._zeroed = True
        if not self._is_reduced:
            self._is_fresh = True
        with self._watch.paused():
            clear()

    def step(self, update: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        """The script has the optimizer step, which ``update`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._watch.paused():
            if self._state is None or not (self._hand or self.is_idle):
                raise UserError("optimizer.step() was called without a batch from the loader that was prepared")
            self._reduce()
            if not self.is_idle:
                update()
                self._close_step()
        return loss

    def mean(self, value: Any) -> float:
        """Of a mean over this worker's part of the batch, the mean over the whole batch."""
        with self._watch.paused():
            own = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            if self.is_idle or self._state is None or self._job.size == 1:
                return own
            if value is self._steps_loss and self.state.vote is not None:
                return self.state.loss
            if self._hand:
                self._place.means += 1
                if self._skipped_means >= self._place.means:
                    return own
            total = torch.tensor([self._weighed(value, own)], dtype=torch.float64)
            try:
                self._job.collective.sum_([total], "elasticdl.mean")
            except WorldBroken as failure:
                log.info("a mean is that of this worker's samples alone: %s", failure)  # the next step mends the world
                return own
            return float(total)

    def _weighed(self, value: Any, own: float) -> float:
        """What this worker adds to a mean over the last batch that it was given."""
        last = self._last
        if last is None or not last.part.weight:
            return 0.0
        # It may have been made again, of another part than the script has seen.
        return last.remade.get(id(value), own * last.part.weight)

    # -- the end of the script --

    def finish(self) -> ViewState | None:
        """Return when the scripts of all workers are done; the state that they end with, if there is one."""
        self._watch.stop()
        if self._state is None:
            return None
        if self.is_behind:
            self._arrive()
        try:
            if self._is_reduced:
                self._job.post(p.On.COMMIT)
        except WorldChanged as change:
            log.info("%s", change)  # which is part of ending
        try:
            self._job.end(self._state)
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
            self._on_left()
            return None
        return self._state

    # -- details --

    def _reduce(self) -> None:
        """Unless that is done, sum the gradients of all workers, in whatever world that is possible."""
        if self._is_reduced or self.is_idle:
            return
        while True:
            samples = sum(given.part.samples for given in self._hand)
            objective = sum((given.objective for given in self._hand), torch.zeros(()))
            try:
                self.state.reduce(plan_of(self._hand, self.state.progress), objective, samples)
                self._is_reduced = True
                return
            except WorldBroken as failure:
                self.state.reset_buffers()
                self._leave(failure)
                if self.is_behind:  # the others have made this step
                    self._hand.clear()
                    return
                if not self._remake():
                    return

    def _remake(self) -> bool:
        """In a new world, gradients of the batches in hand, which are divided anew. If that can't be, the script is given
        them again."""
        state = self.state
        state.begin_step()
        state.drop_gradients()
        try:
            for given in self._hand:
                self._job.advance(waiting=False)
                self._remake_one(given)
            return True
        except Exception as error:  # whatever the script's functions say of other samples
            first = self._hand[0].batch
            self._job.warn(
                f"step {state.step + 1} was torn, and is made by another pass through the script's loop, from batch "
                f"{first.number + 1} of epoch {first.epoch + 1}: {one_line(error)}"
            )
            if first.epoch != self._hand[-1].batch.epoch:
                raise UserError("a step that was torn has batches of two epochs, which can't be given again") from error
            self.repeats = first
            self._hand.clear()
            state.drop_gradients()
            return False

    def _remake_one(self, given: Given) -> None:
        """In pieces that are not larger than what the script was given."""
        most = len(given.part.indices)
        given.part = self.part_of(given.batch)
        given.objective = torch.zeros(())
        given.remade.clear()
        self.seed(given.batch)
        for start in range(0, given.part.samples, most):
            piece = given.part.indices[start : start + most]
            sample = self.batches.load_at_once(piece)
            weight = len(piece) / len(given.batch.indices)
            backward = functools.partial(self._weighed_backward, given, weight)
            for each, tensor in given.tape.remake(sample, backward).items():
                if tensor.numel() == 1:
                    given.remade[each] = given.remade.get(each, 0.0) + float(tensor.detach()) * weight

    def _weighed_backward(self, given: Given, weight: float, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """As much of the gradient of the mean over a global batch as comes from a part of this weight."""
        scale = self._scalers[0].get_scale() if self._scalers else 1.0
        given.objective = given.objective + loss.detach().sum().float() * (weight / scale)
        if weight != 1.0:
            gradient = kwargs.get("gradient")
            kwargs = {**kwargs, "gradient": torch.ones_like(loss) * weight if gradient is None else gradient * weight}
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def _require_no_gradients(self) -> None:
        if not self._zeroed and self.state.has_gradients:
            raise UserError(
                "the gradients of the last step are still there: call optimizer.zero_grad() between a step and the next backward()"
            )
        self.state.drop_gradients()

    def _close_step(self) -> None:
        self._steps_loss = self._hand[0].loss if len(self._hand) == 1 else None
        for given in self._hand:
            given.forget()
        self._hand.clear()
        self._is_reduced = False
        self._is_fresh = True
        self._skipped_means = 0
        self._watch.stop_noting()

    def _leave(self, why: WorldChanged | WorldBroken) -> None:
        if self.is_behind:  # others may be sent what this worker was sent
            self.state.go_back()
        self._change(lambda: self._job.change_world(self.state, why))

    def _change(self, enter: Callable[[], None]) -> None:
        """Be in another world."""
        self.state.was_loaded = False
        try:
            enter()
        except Stopped as stopped:
            self._end_process(stopped)
        self.is_behind = self.is_behind or self.state.was_loaded

    def _end_process(self, stopped: Stopped) -> NoReturn:
        log.info("leaving: %s", stopped.reason)
        self._watch.stop()
        self._on_left()
        sys.exit(0)

    def _arrive(self) -> None:
        """This worker stands where the job stands, with the state that it was sent."""
        passed, seconds = self._from_memory.batches, self._from_memory.seconds
        self._from_memory.end()
        log.info("has caught up: %d batches of others in %.3f s", passed, seconds)
        self.state.go_back()
        self._skipped_means = self._place.means
        self.is_behind = False
        self._is_reduced = False
        self._last = self._steps_loss = None
        self._hand.clear()
