"""A world of one whose batch is the global batch: what a script sees that knows nothing of other workers.

The script is given its loader's batches, of each of which this worker has a part; it calls ``backward`` and
``optimizer.step`` as on one device. Gradients are summed when it looks at them first, or steps. Of worlds that change
(`elasticdl.elastic.torch_kit.participant`) its control flow notices nothing.

A worker that comes later runs the same script from its top. It is given a stand-in for each batch that the job has trained
on already, and what it makes of those has no effect; so its loops count as those of the others have counted. Most of the way
it goes before it asks for a world, and nobody waits for it. Then its state is replaced by the job's.

This is the host of a plain loop. With it the order of its samples, what can't be right on a newcomer, and the means that it asks for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import ReferenceType

import torch
from torch.utils.data import DataLoader

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.elastic.core.plan import MicroBatch, Progress
from elasticdl.elastic.torch import loop_faults
from elasticdl.elastic.torch.approach import Approach
from elasticdl.elastic.torch.loop_faults import place_in_script
from elasticdl.elastic.torch.torn_step import CannotRemake, NotedBatch, Tape, Watch, storage_of, weighed_backward
from elasticdl.elastic.torch_kit.agreements import EpochBegin, ScriptPosition
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OpenBatch, OwnLoader, SubBatch
from elasticdl.elastic.torch_kit.participant import JoinedHost, Outcome, Participant
from elasticdl.elastic.torch_kit.passes import Remedy
from elasticdl.elastic.torch_kit.refusals import Optimizers, each_of
from elasticdl.elastic.torch_kit.tensors import (
    ElasticContext,
    RandomStreams,
    local,
    refuse_others,
    restore_streams,
    streams,
    sum_of_all,
)

# The order in which the samples of an epoch are trained on, as it is drawn on a worker.


class Order:
    """Of the present epoch."""

    def __init__(self, batches: OwnLoader) -> None:
        self.drawn: list[GlobalBatch] = []
        self.outside = streams()  # random streams, as the script knows them outside its loop over batches
        self._batches = batches
        self._from: EpochBegin | None = None

    def draw(self, epoch: int, jobs: ScriptPosition | None) -> None:
        """``jobs``: where the job stands, on a worker that is on its way there."""
        if jobs is not None:
            theirs, ours = jobs.begin_of(epoch), self._from
            if ours is not None and ours.epoch == epoch and theirs in (ours, None):  # drawn again it may be another one
                return
            jobs.put_back(epoch, self._batches.draws)
        self._from = EpochBegin(epoch, RandomStreams.capture(), self._batches.draws.capture())
        self.drawn = self._batches.of_epoch(epoch)
        self.outside = streams()


# Means over the global batch that a plain loop asks for, of what it has made of a worker's part.

ASKED_IN_TORN = "elastic.mean() was called before optimizer.step(), and a worker was lost that has a part of it"


class Means:
    """All workers ask for the same ones, in the same order."""

    def __init__(self, job: ElasticContext) -> None:
        # The script's, of the last step, if that was made of one.
        self.steps_loss: ReferenceType[torch.Tensor] | None = None
        self._job = job

    def of(self, value: Any, own: float, participant: Participant, given: NotedBatch | None) -> float:
        """``own``: the value over this worker's part of the batch that was ``given`` last."""
        vote, loss = participant.state.vote, self.steps_loss
        if participant.is_reduced and given is not None and len(participant.open_batches) == 1:
            loss = given.loss
        if loss is not None and value is loss() and vote is not None:
            return vote.loss
        again = given.tape.again(value) if given is not None else None
        if self._job.is_alone and not participant.is_torn:
            return own if again is None else again
        # Of a part that has become another one, unless ``value`` was made later, or of no batch.
        weight = 0.0 if given is None else given.weight if again is None else given.part.weight

        def tell() -> float:
            if participant.is_torn:
                raise CannotRemake(ASKED_IN_TORN)
            total, counted = sum_of_all(self._job, own * weight if again is None else again, weight)
            return total / counted if counted else own

        about = f"an elastic.mean() after step {participant.state.step}"
        return float(participant.agreements.agree(tell, own, alone=about) or 0.0)


class LoopGradients:
    """Those of the batches in hand, of all optimizers: which of these have stepped, and whether the script has cleared what was there before."""

    def __init__(self, optimizer: torch.optim.Optimizer | Optimizers) -> None:
        self._optimizers = each_of(optimizer)
        self._stepped: list[torch.optim.Optimizer] = []
        self._is_begun = False  # gradients are made, or summed

    def begin(self, state: LoopState) -> None:
        """Before a backward pass, and before the sum.

        Raises:
            UserError: gradients are there that can't be right.
        """
        state.reducer.weighed.require()
        if self._is_begun:
            return
        self._is_begun = True
        for parameter in state.parameters():
            if parameter.grad is not None and bool(local(parameter.grad).any()):
                raise UserError(loop_faults.NOT_CLEARED)
            parameter.grad = None
        state.reducer.weighed.accept()

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """It has stepped. Returns whether all have."""
        self._stepped.append(optimizer)
        return len(self._stepped) == len(self._optimizers)

    def has_stepped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """None: any of them."""
        return bool(self._stepped) if optimizer is None else any(each is optimizer for each in self._stepped)

    def close_step(self) -> None:
        """The parameters have changed, or stay as they are for good."""
        self._stepped, self._is_begun = [], False


log = logging.getLogger(__name__)


class Values(types.SimpleNamespace):
    """See `elasticdl.elastic.torch.prepare.PlainLoop.values`."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


P = ParamSpec("P")
Result = TypeVar("Result")


def lasting(method: Callable[Concatenate[LoopHost, P], Result]) -> Callable[Concatenate[LoopHost, P], Result]:
    """Once it has said that training can't go on, it says so again: a script may swallow any exception, and go on."""

    @functools.wraps(method)
    def wrapped(self: LoopHost, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        if self.fault is not None:
            raise self.fault
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.keep_fault(error)
            raise

    return wrapped


class LoopHost(JoinedHost):
    """Between a plain loop and the `Participant` of the job."""

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        data: OwnLoader,
        values: dict[str, Any],
        on_left: Callable[[], None],
        share: float = 1.0,
        start: int | None = None,
    ) -> None:
        """``values``: what else travels, by name. ``on_left``: this worker leaves for good. ``share``: see `Participant`.
        ``start``: see `Approach`."""
        super().__init__(job, on_left)
        self.fault: Exception | None = None  # which has ended the script, if it was not swallowed
        self._model = model
        self._optimizer = optimizer
        self._data = data
        self._values = values
        self._share = share
        self._order = Order(data)
        # The script must be given this one again, and those after it; and why.
        self._repeats: tuple[OpenBatch, Exception] | None = None
        self._passes_more = 0  # by this script, than there were batches
        self._watch = Watch(model, self)
        self._approach = Approach(job, model, data, start or 0)
        self._epochs = 0  # begun by the script
        self._last: NotedBatch | None = None
        self._means = Means(job)
        self._gradients = LoopGradients(optimizer)
        self._scalers: list[torch.amp.GradScaler] = []
        self._unused: list[Tape] = []  # of batches of this loop since the last step, without gradients
        self._unsure: list[Callable[[], object]] = []  # what rank 0 may not have done: gradients were not summed since
        self._looked_at = ""  # the place in the script where it has looked at gradients last
        if job.under_master:
            refuse_others(optimizer, lambda: self._is_in_batch, "give it to elastic.prepare, too")

    @property
    def is_idle(self) -> bool:
        """What the script does at present has no effect."""
        if self._joined is None:
            return self._epochs > 0 or self.job.comes_later
        return self._repeats is not None or self._joined.is_catching_up

    @property
    def open_batches(self) -> Sequence[OpenBatch] | None:
        """The batches since the last step; None if what the script does has no effect."""
        return None if self._joined is None or self.is_idle else self._joined.open_batches

    @property
    def is_behind(self) -> bool:
        """The script is not yet where the job is. (One that is given batches again is.)"""
        return self.is_idle and self._repeats is None

    @property
    def is_on_its_way(self) -> bool:
        """The script is in its loop, where the job is not."""
        return self._epochs > 0 and self.is_behind

    @property
    def hint(self) -> str:
        """What may be behind an exception that the script raises."""
        return loop_faults.ON_ITS_WAY if self.is_on_its_way else ""

    # -- an epoch --

    @lasting
    def begin_epoch(self) -> None:
        """The script begins to loop over its loader."""
        if self._joined is not None:
            self._turn(is_new_loop=True)
        if self._epochs == 0:
            self._approach.begin()
        epoch = self._next_epoch
        if self._joined is None and (epoch, 0) >= self._approach.jobs_place:
            self._begin((epoch, 0))
        self._epochs += 1
        if self._joined is not None and not self._joined.is_catching_up:
            self._joined.position.note_streams(epoch, self._data.draws, since=self._joined.state.progress.epoch)
        if self._repeats:
            raise UserError("a step that was torn was made after the loop over its batches, which can't be given again")
        self._draw(epoch)

    def batches(self) -> Iterator[Any]:
        """What the script is given in this epoch."""
        try:
            yield from self._batches()
        except Exception as error:
            self.keep_fault(error)
            raise

    def _batches(self) -> Iterator[Any]:
        first = 0
        if self._joined is None:
            first = yield from self._approach.stand_ins(self._order.drawn)
            if first == len(self._order.drawn):
                return
            self._begin(self._order.drawn[first].start)
            self._draw(self._order.drawn[first].epoch)
        for sample in self.participant.batches(first):
            if self.participant.open_batches and self._owes_passes:
                self.participant.drop(CannotRemake())
            with self._watch.around_batch() if self.participant.open_batches else contextlib.nullcontext():
                yield sample

    def keep_fault(self, error: Exception) -> None:
        """To say it again, if training can't go on."""
        if isinstance(error, ElasticDLError) or error is self.job.failure:
            self.fault = error

    def end_epoch(self) -> None:
        """There is no further batch in this epoch."""
        self.pause()
        self._approach.stands = self._next_epoch, 0
        participant = self._joined
        if participant is None:
            return
        self._turn()
        last, at = self._order.drawn[-1], participant.state.progress
        if not participant.is_catching_up:
            participant.state.last_step_made()
        elif (at.epoch, at.position) <= (last.epoch, last.end):
            participant.arrive()

    def pause(self) -> None:
        """The script leaves its loop over batches."""
        restore_streams(self._order.outside)

    def _draw(self, epoch: int) -> None:
        joined = self._joined
        self._order.draw(epoch, joined.position if joined is not None and joined.is_catching_up else None)
        if joined is not None:
            joined.drawn = self._order.drawn

    @property
    def _next_epoch(self) -> int:
        """Of the job, with which the script's next loop begins."""
        return self._approach.begins + self._epochs

    def _begin(self, here: tuple[int, int]) -> None:
        """Be in a world. The script stands at this epoch and position."""
        position, start = ScriptPosition(), self._approach.begins
        if self._epochs == 0:
            position.note_streams(start, self._data.draws, since=start)
        values = {**self._values, "place": position}
        self._scalers = [each for each in values.values() if isinstance(each, torch.amp.GradScaler)]
        remedy = Remedy("loss.backward()") if self.job.under_master else None  # else all is as without elasticdl
        state = LoopState(self.job, self._model, self._optimizer, values, self._data, remedy=remedy)
        self._joined = Participant(self.job, state, self, position, self._data, share=self._share)
        if start:
            self.job.loaded(Progress(start))
        self._joined.join()
        self._approach.joins(at := state.progress)
        if self._approach.has_passed_by and here > (at.epoch, at.position):
            self._fail_alone(loop_faults.NOBODY_IS_LEFT)
            sys.exit(1)

    def _fail_alone(self, why: str) -> None:
        log.error("%s", why)
        self.job.fail(why, "", users=False)
        self.left()

    # -- a batch, as the participant sees it --

    def next_number(self, number: int) -> int:
        if self._repeats is None:
            return number
        (first, why), self._repeats = self._repeats, None
        if self.job.rank == 0 and str(why):
            self.job.warn(loop_faults.given_again(self.participant.state.step + 1, why))
        self._passes_more += number - first.batch.number
        place = self.participant.position
        answers, repeats = place.answers.state_dict(), place.repeats
        self.participant.state.go_back()
        self._gradients.close_step()
        place.answers.load_state_dict(answers)
        place.repeats = repeats
        if first.noted is not None:
            self.participant.state.attributes.put_back(first.noted)
        return first.batch.number

    @lasting
    def asks_for(self, batch: GlobalBatch) -> bool:
        self._turn()
        return False

    @property
    def _owes_passes(self) -> bool:
        """The job's workers have made a pass more through their loops than this one, or will."""
        return self.participant.position.passes_more(self._approach.begins) > self._passes_more

    def passed_by(self, batch: GlobalBatch) -> None:
        self._approach.pass_by(batch)

    def loading(self, batch: GlobalBatch) -> contextlib.AbstractContextManager[None]:
        self.participant.seed(batch)  # also for what the script does with the batch
        return contextlib.nullcontext()

    def opened(self, batch: GlobalBatch, part: MicroBatch, sample: Any) -> OpenBatch:
        if not self.participant.open_batches:
            self.participant.state.reducer.weighed.accept()
        self._means.steps_loss = None
        state = self.participant.state
        # In its first step a worker notes all the same: what can't be right is refused before others come.
        rests = self.job.is_alone and state.has_trained and not (self._owes_passes or self.participant.is_torn)
        tape = Tape(sample, unused=self._unused, others=self._others_storages, rests=rests)
        self._last = NotedBatch(batch, part, tape=tape, weight=part.weight)
        if self.job.under_master:
            self._last.noted = None if rests else state.attributes.note()
            self._watch.tape = tape
        return self._last

    def step_over(self) -> None:
        open_batches = self._noted_batches
        self._means.steps_loss = open_batches[0].loss if len(open_batches) == 1 else None
        self._gradients.close_step()
        self._unused.clear()
        self._watch.tape = None

    def arrived(self) -> None:
        self._last = self._means.steps_loss = None
        self._gradients.close_step()
        self._approach.ends()

    # -- what the script does with a batch --

    def _turn(self, *, is_new_loop: bool = False) -> None:
        """The script is done with the batch that it was given last, if it was given one since the last step: it asks for another, or
        begins a new loop. One of which it has made nothing is no part of the step.

        Raises:
            UserError: it has left the batch out by the number of this worker's samples.
        """
        participant, open_batches = self.participant, self._noted_batches
        if is_new_loop:
            self._unused.clear()
        is_stepped = not open_batches or participant.is_reduced
        if is_stepped or open_batches[-1].backwards or not self.job.under_master:
            return
        last, tape = open_batches[-1], open_batches[-1].tape
        if not is_new_loop:
            if tape.looked_at_size and not tape.is_for_model and not self.job.is_alone:
                whole, mine = len(last.batch.indices), last.part.samples
                raise UserError(loop_faults.left_out_by_size(tape.looked_at_size, whole, mine))
            self._unused.append(tape)
        if tape.is_untouched:
            participant.open_batches.pop()

    def noted(self) -> Callable[[], None]:
        attributes = self.participant.state.attributes
        return functools.partial(attributes.put_back, attributes.note())

    @lasting
    def before_look(self, tensor: torch.Tensor) -> None:
        if not self.is_idle and isinstance(tensor, torch.nn.Parameter) and self._has_gradients:
            self._looked_at = self._looked_at if self.participant.is_reduced else place_in_script("")
            self.reduce()
        elif self._last is not None:
            self._last.tape.look_at_gradient(tensor)

    def before_set(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if self._share != 1.0 and any(each.backwards for each in [*(self.open_batches or ())][:-1]):
            raise UserError(loop_faults.DROPS_GRADIENTS)
        self._note_dropped([tensor])

    def before_grad(self, inputs: Sequence[torch.Tensor]) -> None:
        trained = set(map(id, Optimizers(each_of(self._optimizer)).parameters))
        if self.job.under_master and any(id(each) in trained for each in inputs):
            raise UserError(loop_faults.GRADIENT_OF_PART)

    def _note_dropped(self, tensors: Sequence[torch.Tensor]) -> None:
        given = self._last
        if given and self._has_gradients and not self.participant.is_reduced:
            given.tape.note_dropped()
            self.participant.state.reducer.require_not_begun(tensors)

    @lasting
    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        given = self._last
        if self.is_idle:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        if not self.participant.open_batches:
            raise UserError(loop_faults.STEPPED_ALREADY)
        if self._gradients.has_stepped():
            raise UserError(loop_faults.STEPPED_BY_ANOTHER)
        if self.participant.is_reduced:
            raise UserError(loop_faults.looked_between(self._looked_at))
        assert given is not None, "it is in hand"
        self._gradients.begin(self.participant.state)
        given.tape.note_backward(loss, kwargs)
        given.backwards += 1
        given.loss = weakref.ref(loss) if given.backwards == 1 else None
        run = functools.partial(weighed_backward, loss, kwargs)
        self.participant.backward(given, given.part.weight, loss, run, scale=self._scale)

    def zero_gradients(self, optimizer: torch.optim.Optimizer, clear: Callable[[], None]) -> None:
        """``clear`` clears the gradients of this optimizer, as the script asks."""
        self._note_dropped([each for group in optimizer.param_groups for each in group["params"]])
        with self._watch.paused():
            clear()
            if self._joined is not None:
                self._joined.state.reducer.weighed.accept()

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
            has_batch = self._joined and self._joined.open_batches and not self._gradients.has_stepped(optimizer)
            is_within = self._watch.is_active or self._has_gradients
            if not self.is_idle and not (has_batch and is_within):
                raise UserError(loop_faults.NO_BATCH if self._watch.is_active else loop_faults.OUTSIDE)
            self.reduce()
            if not self.is_idle:
                self._update(optimizer, update)
        return loss

    def _update(self, optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
        update()
        if isinstance(self._optimizer, Optimizers) and not self._gradients.has_stepped():
            self._optimizer.made()
        if self._gradients.step(optimizer):
            self.participant.close()

    @lasting
    def mean(self, value: Any) -> float:
        """Of a mean over this worker's part of the batch, the mean over the whole batch."""
        with self._watch.paused():
            if self._last is not None:
                self._last.tape.is_untouched = False  # something comes of its batch
            own = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            return own if self._joined is None or self.is_idle else self._means.of(value, own, self._joined, self._last)

    @lasting
    def agree(self, tell: Callable[[], Result]) -> Result | None:
        """What ``tell``, a collective, gives all workers; None on one that is alone, or whose world has broken meanwhile."""
        with self._watch.paused():
            return None if self._joined is None or self.is_idle else self._joined.agreements.agree(tell, None)

    @lasting
    def on_one(self, act: Callable[[], object]) -> None:
        """Rank 0 does this; who becomes rank 0 before gradients are summed next does it, too, from the same parameters."""
        if not self.is_idle:
            self._unsure.append(act)
            with self._watch.paused():
                self._make_up()

    def _make_up(self) -> None:
        if self.is_first:
            while self._unsure:
                self._unsure.pop(0)()

    # -- the end of the script --

    @lasting
    def finish(self) -> LoopState | None:
        """Return when the scripts of all workers are done; the state that they end with, if there is one."""
        if self._joined is None:
            if not (self._next_epoch or self.job.comes_later):
                return None
            # The others wait behind their last step, in an epoch that is not over.
            ends = [(each.epoch, each.end) for each in self._order.drawn[-1:]]
            self._begin(min([self._approach.stands, *ends]))
        at = self.participant.state.progress
        if self.is_catching_up and self._approach.is_short_of(at):
            self._fail_alone(loop_faults.ended_on_stand_ins(self._next_epoch, at.epoch + 1))
            return None
        if state := super().finish():
            self._make_up()
        return state

    # -- a step that is torn --

    @contextlib.contextmanager
    def as_before_step(self) -> Iterator[None]:
        open_batches = self._noted_batches
        if any(given.tape.is_lost for given in open_batches):  # who is sent the state next has to know
            self._note_repeat(open_batches[0], open_batches[-1])
        own = [each for each in self.participant.state.pieces if isinstance(getattr(each, "value", None), Values)]
        counted = [copy.deepcopy(each.dump()) for each in own]
        for piece in own:
            piece.undo()
        try:
            yield
        finally:
            for piece, values in zip(own, counted, strict=True):
                piece.load(values)
        self._make_up()

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        if self._owes_passes and not any(given.tape.is_lost for given in self._noted_batches):
            raise CannotRemake(loop_faults.OTHERS_REPEAT)

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        assert isinstance(given, NotedBatch)

        def backward(loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
            run = functools.partial(weighed_backward, loss, kwargs)
            self.participant.backward(given, weight, loss, run, scale=self._scale)

        given.tape.remake(sample, weight, backward)

    def cannot_remake(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        self._note_repeat(first, last)
        self._repeats = first, error
        if first.batch.epoch != last.batch.epoch:
            raise UserError("a step that was torn has batches of two epochs, which can't be given again") from error

    # -- details --

    @property
    def _noted_batches(self) -> Sequence[NotedBatch]:
        return cast(list[NotedBatch], self.participant.open_batches)

    def _others_storages(self) -> tuple[Container[int], Container[int]]:
        """Of parameters that are trained, and of what a torn step puts back."""
        state = self.participant.state
        return {storage_of(each) for each in state.parameters() if each.requires_grad}, {
            storage_of(each) for each in state.reducer.moved()
        }

    def _note_repeat(self, first: OpenBatch, last: OpenBatch) -> None:
        """The script is given these once more, and so is that of every other worker: loops count alike."""
        if not self._owes_passes:
            self.participant.position.repeat(first.batch.epoch, last.batch.number + 1 - first.batch.number)

    @property
    def _has_gradients(self) -> bool:
        """Backward passes were made of the open batches."""
        return any(each.backwards for each in self.open_batches or ())

    @property
    def _is_in_batch(self) -> bool:
        """The script works on one."""
        return self._last is not None and self._watch.is_active

    @property
    def _scale(self) -> float:
        return self._scalers[0].get_scale() if self._scalers else 1.0

    def reduce(self) -> None:
        """Sum the gradients of the open batches."""
        if self.is_idle or self.participant.is_reduced:
            return
        with self._watch.paused():
            self._gradients.begin(self.participant.state)
            if self.participant.settle() is Outcome.MADE:
                self._watch.tape = None  # it can't be torn any more
                self._unsure.clear()


# What a script holds, made to speak to the host.


class PreparedLoader:
    """The script's own loader, as far as the script can tell; each worker loads its part of each batch."""

    def __init__(self, loader: DataLoader[Any], host: LoopHost) -> None:
        self._loader = loader
        self._host = host
        self._turns = 0  # loops over it that were begun

    def __len__(self) -> int:
        """Batches of an epoch, whatever the number of workers."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled():  # an evaluation: no step is made, so each worker needs whole batches
            yield from self._loader
            return
        self._turns += 1
        turn = self._turns
        self._host.begin_epoch()
        try:
            for sample in self._host.batches():
                yield sample
                if turn != self._turns:
                    raise UserError(
                        "the prepared loader is looped over twice at once; expected one loop after the other"
                    )
            self._host.end_epoch()
        finally:
            if turn == self._turns and not sys.is_finalizing():
                self._host.pause()


def speak_to(host: LoopHost, optimizer: torch.optim.Optimizer) -> None:
    own_step, own_zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(own_step)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = host.step(optimizer, lambda: own_step(**options), closure)
        # A scheduler would warn otherwise on a worker that is catching up, whose own step is not called.
        self._opt_called = True  # type: ignore[attr-defined]
        return result

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        host.zero_gradients(optimizer, lambda: own_zero_grad(set_to_none))

    # Bound methods, as torch's schedulers take the function out of one.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
