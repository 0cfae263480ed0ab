"""A world of one whose batch is the global batch: what a script sees that knows nothing of other workers.

The script is given its loader's batches, of each of which this worker has a part; it calls ``backward`` and
``optimizer.step`` as on one device. Gradients are summed when it looks at them first, or steps. Of worlds that change
(`elasticdl.elastic.torch_kit.participant.steps`) its control flow notices nothing.

A worker that comes later runs the same script from its top. It is given a stand-in for each batch that the job has trained
on already, and what it makes of those has no effect; so its loops count as those of the others have counted. Most of the way
it goes before it asks for a world, and nobody waits for it. Then its state is replaced by the job's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch import loop_faults
from elasticdl.elastic.torch.from_memory import ModelFromMemory
from elasticdl.elastic.torch.loop_faults import lasting
from elasticdl.elastic.torch.newcomer import Hints, moved, require_one_begin
from elasticdl.elastic.torch.order import Order
from elasticdl.elastic.torch.replay import Replay
from elasticdl.elastic.torch.watch import Watch
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch, OwnLoader, RandomStreams
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState, OpenBatch, ScriptPosition, Standing
from elasticdl.elastic.torch_kit.participant.means import Means
from elasticdl.elastic.torch_kit.participant.steps import Steps
from elasticdl.elastic.torch_kit.pieces.optimizers import Optimizers, each_of
from elasticdl.elastic.torch_kit.pieces.own_optimizers import OwnOptimizers
from elasticdl.elastic.torch_kit.pieces.schedulers import rest_while
from elasticdl.elastic.torch_kit.reduction.gradients import LoopGradients
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

log = logging.getLogger(__name__)


class LoopParticipant:
    """This worker's part in what the script does, between its loader and its optimizer."""

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        batches: OwnLoader,
        values: Callable[[], dict[str, Any]],
        on_left: Callable[[], None],
        share: float = 1.0,
    ) -> None:
        """``values``: asked at the first batch for what else travels. ``on_left``: this worker leaves for good. ``share``: see `Steps`."""
        self.batches = batches
        self._order = Order(batches)
        self.repeats: GlobalBatch | None = None  # the script must be given this one again, and those after it
        self.job = job
        self._model = model
        self._optimizer = optimizer
        self._values = values
        self._on_left = on_left
        self._share = share
        self._watch = Watch(model, self)
        self._from_memory = ModelFromMemory(model)
        self._begun: Steps | None = None  # before this worker asks for a world
        self._approach = (0, 0)  # epochs, and batches of the next, that are passed by before
        self._epochs = 0  # begun by the script
        self._stands = Standing(0, 0, 0)  # the script, behind the last batch that it was given, or a stand-in for that
        self._last: OpenBatch | None = None
        self._means = Means(job)
        self._gradients = LoopGradients(optimizer, job.warn, may_be_summed=job.under_master)
        self._scalers: list[torch.amp.GradScaler] = []
        self._replay = Replay(lambda: self.steps, lambda: self._scale, self._give_again)
        self._is_fresh = True  # no gradient was made of the batches in hand
        self._hints = Hints()
        self._began_with = moved(each_of(optimizer))
        self.fault: Exception | None = None  # which has ended the script, if it was not swallowed
        if job.under_master:
            OwnOptimizers(model, optimizer, self._begin_of_batch, "give it to elastic.prepare, too")

    @property
    def is_idle(self) -> bool:
        """What the script does at present has no effect."""
        if self._begun is None:
            return self._epochs > 0 or self.job.comes_later
        return self.repeats is not None or self._begun.is_catching_up

    @property
    def open_batches(self) -> list[OpenBatch] | None:
        """The batches since the last step; None if what the script does has no effect."""
        return None if self._begun is None or self.is_idle else self._begun.open_batches

    @property
    def is_on_its_way(self) -> bool:
        """The script is in its loop, where the job is not."""
        return self._epochs > 0 and self.is_idle and self.repeats is None

    def about_failure(self) -> str:
        """What helps where the script has raised."""
        return self._hints.about(on_its_way=self.is_on_its_way)

    # -- for the loader --

    @property
    def drawn(self) -> list[GlobalBatch]:
        return self._order.drawn

    def begin_repeating(self) -> int:
        """The number of the batch that the script is given next."""
        assert self.repeats is not None, "there are batches to repeat"
        self._watch.stop()
        number, self.repeats = self.repeats.number, None
        answers = self.steps.place.answers.state_dict()
        self.steps.state.go_back()
        self.steps.place.answers.load_state_dict(answers)
        return number

    @property
    def steps(self) -> Steps:
        assert self._begun is not None, "there are steps from the first batch on"
        return self._begun

    @lasting
    def begin_epoch(self) -> None:
        """The script begins to loop over its loader."""
        epoch = self._epochs
        if self._begun is not None:
            self._replay.turn(is_new_loop=True)
        if epoch == 0:
            self._approach = self.job.session.jobs_place()
        if self._begun is None and (epoch, 0) >= self._approach:
            self._begin(GlobalBatch(epoch, 0, 0, ()))
        self._epochs += 1
        if self._begun is not None and not self._begun.is_catching_up:
            self._begun.place.note_streams(epoch, self.batches.draws, since=self._begun.state.progress.epoch)
        if self.repeats:
            raise UserError("a step that was torn was made after the loop over its batches, which can't be given again")
        self._draw(epoch)

    def _draw(self, epoch: int) -> None:
        self._order.draw(epoch, self._begun.place if self._begun and self._begun.is_catching_up else None)

    def _begin(self, batch: GlobalBatch) -> None:
        """Be in a world. The script asks for this batch."""
        place = ScriptPosition(self._began_with)
        if self._epochs == 0:
            place.note_streams(0, self.batches.draws, since=0)
        values = {**self._values(), "place": place, "gradients": self._gradients}
        for each in filter(lambda value: isinstance(value, LRScheduler), values.values()):
            rest_while(lambda: self._begun is not None and self.is_idle, each)
        self._scalers = [each for each in values.values() if isinstance(each, torch.amp.GradScaler)]
        state = LoopState(self.job, self._model, self._optimizer, values, self.batches)
        self._begun = Steps(
            self.job, state, self.batches.load_at_once, self._replay, self._leave_for_good, place, share=self._share
        )
        self._begun.join()
        require_one_begin(self._began_with, place.began_with)
        at = state.progress
        if batch.start > (at.epoch, at.position):
            self._fail_alone(loop_faults.NOBODY_IS_LEFT)
            sys.exit(1)

    def _fail_alone(self, why: str) -> None:
        log.error("%s", why)
        self.job.fail(why, "", users=False)
        self._leave_for_good()

    def _leave_for_good(self) -> None:
        self._watch.stop()
        self._on_left()

    def end_epoch(self) -> None:
        """There is no further batch in this epoch."""
        self.pause()
        self._stands = Standing(self._epochs, 0, 0)
        if self._begun is None:
            return
        self._replay.turn()
        if self._begun.open_batches and not self._begun.state.step and self._begun.state.hooks.may_step:
            raise UserError(loop_faults.STEP_IN_HOOK)
        if not self._begun.is_catching_up:
            self._begun.state.last_step_made()
        epoch, samples = self.drawn[-1].epoch, self.drawn[-1].end
        at = self.steps.state.progress
        if self.steps.is_catching_up and (at.epoch, at.position) <= (epoch, samples):
            self._arrive()

    def pause(self) -> None:
        """The script leaves its loop over batches, or is between two of them."""
        self._watch.stop()
        RandomStreams.restore(self._order.outside)

    @lasting
    def may_give(self, number: int) -> bool:
        """Whether the script is to be given its part of this batch next; if not, a stand-in. The world may change here, and
        in the first also what was drawn."""
        self._watch.stop()
        batch = self.drawn[number]
        self._stands = Standing.behind(batch)
        if self._begun is None:
            if (batch.epoch, number) < self._approach:
                self._from_memory.begin_batch()
                return False
            self._begin(batch)
            self._draw(batch.epoch)
            batch = self.drawn[number]
        steps = self.steps
        self.job.advance(Activity.DATA)
        self._replay.turn()
        if steps.is_reduced:  # a GradScaler has seen that gradients are not finite: the step is skipped
            self._close_step()
        while not steps.open_batches:
            at = steps.state.progress
            if steps.is_catching_up and batch.start < (at.epoch, at.position):
                if steps.may_pass_by():
                    self._from_memory.begin_batch()
                    return False
                continue
            if steps.is_catching_up:
                self._arrive(batch.epoch)
            if steps.commit(batch.epoch):
                break
        return True

    def give(self, batch: GlobalBatch, sample: Any) -> None:
        """The script goes on with this sample, its part of the batch."""
        if not self.steps.open_batches:
            self._is_fresh = True
            self._gradients.begin_step()
        self._means.steps_loss = None
        before, tape = self._last, self._replay.new_tape(sample, self._hints.kept)
        self._last = OpenBatch(batch, self.steps.part_of(batch), sample, tape)
        self._hints.given(self._last, before)
        if self._may_be_torn:
            self._last.noted = self.steps.state.attributes.note()
        self.steps.give(self._last)
        self._watch.start(self._last.tape if self.job.under_master else None)

    # -- what the script does with a batch --

    @lasting
    def before_look(self, tensor: torch.Tensor) -> None:
        if not self.is_idle and isinstance(tensor, torch.nn.Parameter) and not self._is_fresh:
            self.reduce()

    def before_set(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if self._share != 1.0 and any(each.backwards for each in (self.open_batches or ())[:-1]):
            raise UserError(loop_faults.DROPS_GRADIENTS)
        self._note_dropped([tensor], zeros=gradient is not None)  # as any others are refused

    def _note_dropped(self, tensors: Sequence[torch.Tensor], *, zeros: bool = False) -> None:
        given = self._last
        if given and not self.is_idle and self._may_be_torn and not self._is_fresh and not self.steps.is_reduced:
            given.tape.note_dropped(tensors, zeros=zeros)

    @lasting
    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        given = self._last
        if self.is_idle:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        loop_faults.require_backward(
            has_batch=bool(self.steps.open_batches),
            has_stepped=self._gradients.has_stepped(),
            is_reduced=self.steps.is_reduced,
        )
        assert given is not None, "it is in hand"
        self._gradients.look(loss, len(given.part.indices), is_scaled=bool(self._scalers))
        self._gradients.begin()
        self._is_fresh = False
        if self._may_be_torn:
            given.tape.note_backward(loss, kwargs)
        given.backwards += 1
        given.loss = loss if given.backwards == 1 else None
        if not self._may_be_torn:
            self._watch.stop_noting()
        self.steps.weighed_backward(given, given.part.weight, loss, kwargs, self._scale)
        self._gradients.made()

    def zero_gradients(self, optimizer: torch.optim.Optimizer, clear: Callable[[], None]) -> None:
        """The script clears the gradients of an optimizer, which ``clear`` does."""
        self._note_dropped([each for group in optimizer.param_groups for each in group["params"]])
        if (self._begun is None or not self._begun.is_reduced) and optimizer is self._optimizer:
            self._is_fresh = True
        with self._watch.paused():
            clear()
            self._gradients.cleared(optimizer)

    @lasting
    def step(
        self, optimizer: torch.optim.Optimizer, update: Callable[[], Any], closure: Callable[[], Any] | None
    ) -> Any:
        """The script has an optimizer step, which ``update`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._watch.paused():
            has_batch = self._begun and self._begun.open_batches and not self._gradients.has_stepped(optimizer)
            if not self.is_idle and not has_batch:
                raise UserError(loop_faults.NO_BATCH)
            self.reduce()
            if not self.is_idle:
                self._update(optimizer, update)
        return loss

    def _update(self, optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
        update()
        if isinstance(self._optimizer, Optimizers) and not self._gradients.has_stepped():
            self._optimizer.made()
        if self._gradients.step(optimizer):
            self._close_step()

    @lasting
    def mean(self, value: Any) -> float:
        """Of a mean over this worker's part of the batch, the mean over the whole batch."""
        with self._watch.paused():
            if self._last is not None:
                self._last.tape.trace.is_untouched = False  # something comes of its batch
            own = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            return own if self._begun is None or self.is_idle else self._means.of(value, own, self._begun, self._last)

    # -- the end of the script --

    @lasting
    def finish(self) -> LoopState | None:
        """Return when the scripts of all workers are done; the state that they end with, if there is one."""
        self._watch.stop()
        if self._begun is None:
            if not self._epochs:
                return None
            if (self._stands.epoch, self._stands.batches) < self._approach:
                self._fail_alone(loop_faults.ended_on_stand_ins(self._epochs, self._approach[0] + 1))
                return None
            self._begin(GlobalBatch(self._epochs, 0, 0, ()))
        if self.steps.is_catching_up:
            at = self.steps.state.progress
            if (at.epoch, at.position) > (self._stands.epoch, self._stands.samples):
                self._fail_alone(loop_faults.ended_on_stand_ins(self._epochs, at.epoch + 1))
                return None
            self._arrive()
        return self.steps.state if self.steps.end() else None

    # -- a step that is torn --

    def _give_again(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        """The script is given these batches, and those between them."""
        batch = first.batch
        self.job.warn(loop_faults.by_another_pass(self.steps.state.step, batch.number, batch.epoch, error))
        if batch.epoch != last.batch.epoch:
            raise UserError("a step that was torn has batches of two epochs, which can't be given again") from error
        self.repeats = batch

    # -- details --

    def _begin_of_batch(self) -> tuple[int, int] | None:
        """Of that which the script works on."""
        return self._last.batch.start if self._last is not None and self._watch.is_active else None

    @property
    def _may_be_torn(self) -> bool:
        """Whether the step in hand may have to be made again."""
        return self.job.size > 1 or self.steps.is_torn

    @property
    def _scale(self) -> float:
        return self._scalers[0].get_scale() if self._scalers else 1.0

    def reduce(self, larger: float = 1.0) -> None:
        """Sum the gradients of the batches in hand. ``larger``: by this the loss is too small, as for a step of fewer batches."""
        if self.is_idle or self.steps.is_reduced:
            return
        with self._watch.paused():
            self._gradients.begin()
            self.steps.reduce(larger=larger)
            if self.steps.is_reduced:
                self._watch.stop_noting()  # it can't be torn any more
                self._gradients.summed()

    def _close_step(self) -> None:
        open_batches = self.steps.open_batches
        self._means.steps_loss = open_batches[0].loss if len(open_batches) == 1 else None
        self.steps.close()
        self._gradients.close_step()
        self._replay.step_made()
        self._hints.step_made()
        self._is_fresh = True
        self._watch.stop_noting()

    def _arrive(self, epoch: int | None = None) -> None:
        """This worker stands where the job stands, with the state that it was sent."""
        passed, seconds = self._from_memory.batches, self._from_memory.seconds
        self._hints.arrived(self._from_memory.end())
        log.info("has caught up: %d batches of others in %.3f s", passed, seconds)
        self.steps.arrive(epoch)
        self._last = self._means.steps_loss = None
