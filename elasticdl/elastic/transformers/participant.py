"""A worker's part in what a ``transformers.Trainer`` does: its part of each batch, and gradients that are everybody's.

The trainer believes that it is alone, with the global batch. It takes all batches of a step first, and makes a forward and
a backward pass of each then. After the last of these the gradients are summed, before it looks at them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.trainer_callback import ProgressCallback

from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch.tape import Tape
from elasticdl.elastic.torch_kit.data.loaders import seed_step
from elasticdl.elastic.torch_kit.data.parts import Batches, RandomStreams
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState, OpenBatch, ScriptPosition
from elasticdl.elastic.torch_kit.participant.steps import Steps, SubBatch
from elasticdl.elastic.torch_kit.pieces.own_optimizers import OwnOptimizers
from elasticdl.elastic.torch_kit.reduction.gradients import WeighedGradients
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.data_facts import EVALUATION, named_sources
from elasticdl.elastic.transformers.checkpoints import FirstsCheckpoint
from elasticdl.elastic.transformers.decisions import Decisions
from elasticdl.elastic.transformers.items import Count, Items
from elasticdl.elastic.transformers.passed import Passed, TrainersState
from elasticdl.elastic.transformers.place import TrainerSnapshot
from elasticdl.elastic.transformers.trainer_holders import PACKAGES, holders_of

log = logging.getLogger(__name__)

# A forward pass draws from another stream than what loads its batch.
FORWARD = zlib.crc32(b"forward")

# Where transformers has its callbacks for TensorBoard and the like.
REPORTS = "transformers.integrations."

# Where a job stands that has no further step.
NO_EPOCH = 2**31

OWN_OPTIMIZER = "have create_optimizer make one of all parameters, these in a group of their own"

# Makes the gradients of some inputs, given the number of items in the step's batches, and returns the loss.
Pass = Callable[[Any, Any], torch.Tensor]


class Participant:
    """One call of `train`, from the trainer's preparation to the end of the script."""

    def __init__(self, trainer: Any, job: ElasticContext, on_left: Callable[[], None]) -> None:
        self._trainer = trainer
        self.job = job
        self._on_left = on_left
        self._place = TrainerSnapshot(trainer)
        self.decisions = Decisions(job)
        self.begins_as_told = False  # the script names the checkpoint that it means
        self.part = 1.0  # this worker's, of the batch that the last pass was made on
        trained = lambda: self._begun.state.parameters()  # noqa: E731
        made_by, to_change = "accelerator.backward(loss)", "in on_pre_optimizer_step"
        self._weighed = WeighedGradients(trained, made_by, job.warn, may_be_summed=True, to_change=to_change)
        self._steps: Steps | None = None  # until the trainer has made model, optimizer and scheduler
        self._batches: Batches | None = None
        self._iterator: Iterator[Any] | None = None  # over the present epoch
        self._epoch = 0
        self._next_epoch = 0  # that callbacks are told of
        self._first = 0  # the number of the batch that the epoch is begun with
        self._step_at: tuple[int, int] | None = None  # that which the trainer makes begins there
        self._passes = 0  # made in this step
        self._given: OpenBatch | None = None  # that the present pass is made on
        self._weight = 1.0
        self._reported: torch.Tensor | float = 0.0  # of the step's loss
        self._items = Items(job)
        self._passed = Passed(job, trainer)
        self._pass: Pass | None = None
        self._was_first = False
        self.unwritten = FirstsCheckpoint(job, lambda: self.is_first, self.rejoin)

    # -- who writes --

    @property
    def is_first(self) -> bool:
        """Whether this worker writes files and prints: true on one, and never on one whose state is another's yet."""
        return self.job.known_rank == 0 and not self.is_catching_up

    @property
    def is_catching_up(self) -> bool:
        """The trainer is on its way to where the job stands."""
        return self._steps is not None and self._steps.is_catching_up

    def tell_rank(self) -> None:
        """To the trainer's callbacks."""
        state, first = self._trainer.state, self.is_first
        state.is_world_process_zero = state.is_local_process_zero = first
        if first and not self._was_first:
            self._begin_reports()
        self._was_first = first

    def _begin_reports(self) -> None:
        """This worker was not the first when training began, where those that report and show progress have looked."""
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) or type(callback).__module__.startswith(REPORTS):
                if hasattr(callback, "_initialized"):
                    callback._initialized = False
                callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)

    # -- the beginning --

    @property
    def has_begun(self) -> bool:
        return self._steps is not None

    def begin_at(self, epoch: int, batch: int) -> None:
        """The trainer begins there, as it resumes from a checkpoint perhaps."""
        state, at = self._trainer.state, self._place.boundary
        self._next_epoch = epoch
        at.epoch, at.batch = epoch, batch
        at.logged_at, at.tokens = state.global_step, state.num_input_tokens_seen

    def join(self, loader: Any) -> None:
        """Be in a world; the trainer has prepared model, optimizer and scheduler."""
        trainer = self._trainer
        self._batches = Batches(loader, "elastic.transformers")
        values = {"scheduler": trainer.lr_scheduler, "trainer": self._place, "place": ScriptPosition()}
        if trainer.accelerator.scaler is not None:
            values["scaler"] = trainer.accelerator.scaler
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state = TrainersState(self.job, trainer.model, optimizer, values, self._passed.agree)
        state.attributes.add(*holders_of(trainer), packages=PACKAGES)
        state.sources += [self._batches.source, *named_sources(EVALUATION, trainer.eval_dataset)]
        state.batches, state.begins_as_told = self._batches, self.begins_as_told
        if done := self._place.done():  # by a checkpoint that the trainer has loaded
            self.job.loaded(done)
        self._steps = Steps(self.job, state, self._batches.load_at_once, self, self._on_left, values["place"])
        trainer.accelerator.backward = functools.partial(self._backward, trainer.accelerator.backward)
        self._step_together(trainer.optimizer)
        if self.job.under_master:
            OwnOptimizers(trainer.model, optimizer, lambda: self._step_at, OWN_OPTIMIZER)
        self._place.outside = RandomStreams.capture()
        self._steps.join()
        if self._place.received is None:  # rank 0 of the first world has its own state
            self._steps.arrive()
        self._was_first = self.is_first
        self.tell_rank()

    def _step_together(self, optimizer: Any) -> None:
        own = optimizer.step

        @functools.wraps(own)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_catching_up:  # the others have made this step
                return None
            result = own(*args, **kwargs)
            self._begun.close()
            return result

        optimizer.step = types.MethodType(step, optimizer)

    @property
    def _begun(self) -> Steps:
        assert self._steps is not None, "there are steps from the trainer's preparation on"
        return self._steps

    def may_evaluate_first(self) -> bool:
        """Whether this worker makes the evaluation before the first step: who comes later is told of it."""
        received, at = self._place.received, self._place.boundary
        if received and self.job.world.is_first and (received["epoch"], received["batch"]) == (at.epoch, at.batch):
            self._arrive()
        return not self.is_catching_up

    # -- an epoch --

    def tell_epoch(self) -> None:
        """Callbacks are about to hear that an epoch begins. On a worker that comes later ``state`` is as it was for the others."""
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        if self.is_catching_up and epoch:
            self._place.stand_at(epoch)

    def begin_epoch(self, epoch: int, first: int) -> int | None:
        """The number of the batch to begin with, which is ``first`` unless the job stands elsewhere; None: not in this epoch."""
        self._iterator, self._epoch, self._first = None, epoch, first
        self._begun.close()  # a callback may have ended the last epoch in the middle of a step
        if self.is_catching_up and self._place.received is not None:
            received = self._place.received
            if epoch < received["epoch"]:
                return None
            self._arrive()
            self._first = received["batch"]
            self._begun.place.put_back(epoch, self._data.draws)
            if self._trainer.control.should_training_stop:
                return None
        return self._first

    def take(self) -> Iterator[Any]:
        """The batches of this epoch that are left, each as this worker's part of it."""
        if self._iterator is None:
            self._iterator = self._load()
        return self._iterator

    @property
    def _data(self) -> Batches:
        assert self._batches is not None, "there is a loader from the trainer's preparation on"
        return self._batches

    def _load(self) -> Iterator[Any]:
        steps, data, epoch = self._begun, self._data, self._epoch
        loader = data.loader
        steps.place.note_streams(epoch, data.draws, since=epoch)
        counting: list[Any] = [loader, getattr(loader.batch_sampler, "batch_sampler", None)]
        for each in counting:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        batches = data.of_epoch(epoch)
        if self._has_arrived_within:  # and has drawn the order once more
            RandomStreams.restore(self._place.outside)
        number, version = self._first, -1
        loaded: Iterator[Any] = iter(())
        while number < len(batches):
            batch = batches[number]
            if not steps.open_batches or steps.is_reduced:
                self._begin_step(epoch, number)
            if version != self.job.world.version:
                version = self.job.world.version
                loaded = data.load(map(steps.part_of, batches[number:]), steps.seed_of_processes(batch))
            with self.apart():
                steps.seed(batch)
                sample = next(loaded)
            steps.give(OpenBatch(batch, steps.part_of(batch), sample, Tape(None)))
            yield sample
            number += 1

    @property
    def _has_arrived_within(self) -> bool:
        at = self._place.boundary
        return self._first > 0 and (at.epoch, at.batch) == (self._epoch, self._first)

    def _begin_step(self, epoch: int, number: int) -> None:
        """The world may change here."""
        steps = self._begun
        self.job.advance(Activity.DATA)
        if steps.is_reduced:  # a GradScaler has seen that gradients are not finite: the step is skipped
            steps.close()
        while True:
            if steps.is_catching_up:
                self._arrive()
                at = (self._place.boundary.epoch, self._place.boundary.batch)
                assert at == (epoch, number), f"the job stands at batch {at}, and this worker at {(epoch, number)}"
            self._place.outside = RandomStreams.capture()
            self._place.note(epoch, number)
            if steps.commit(epoch):
                break
        self.tell_rank()
        self._step_at = (epoch, number)
        self._passes, self._reported, self._items.total = 0, 0.0, None
        self._weighed.begin()
        self._passed.begin()

    def _arrive(self) -> None:
        """This worker stands where the job stands, with the state that it was sent."""
        self._begun.arrive()
        self._place.apply()
        RandomStreams.restore(self._place.outside)
        self.tell_rank()

    # -- a step --

    def count(self, samples: list[Any], count: Count) -> Any:
        """Of items such as tokens in the batches that were taken; None if the trainer does not count them."""
        return self._items.of_step(samples, self._begun.open_batches, count)

    def make_pass(self, inputs: Any, items: Any, run: Pass) -> torch.Tensor:
        """Forward and backward of one batch; after the last of the step, gradients are everybody's. Returns the loss."""
        steps = self._begun
        self._pass = run
        if not steps.open_batches or steps.is_reduced:  # the trainer does what is not on a batch of its loader
            return run(inputs, items)
        given = steps.open_batches[self._passes]
        self._passes += 1
        self.part = len(given.part.indices) / len(given.batch.indices)
        if self.job.size > 1:
            given.noted = steps.state.attributes.note()
        loss = self._run(given, given.part.weight, inputs, items)
        world = self.job.world
        if self._passes < len(steps.open_batches):
            if world.size > 1:  # the whole step's comes with its last batch
                return torch.zeros_like(loss)
            self._reported = self._reported + loss
            return loss
        self._weighed.require()
        with self.apart():  # a step that is torn is made again
            steps.reduce()
        self.tell_rank()
        self.unwritten.write()
        vote = steps.state.vote
        if steps.is_catching_up or vote is None or (world.size == 1 and self.job.world.version == world.version):
            return loss
        return torch.full_like(loss, vote.loss) - self._reported

    def _run(self, given: OpenBatch, weight: float, inputs: Any, items: Any) -> torch.Tensor:
        assert self._pass is not None, "a pass was made"
        self._given, self._weight = given, weight
        streams = zlib.crc32(self._begun.place.streams[given.batch.epoch], FORWARD)
        try:
            # A loss is a sum over items by their number, or a mean over samples, or has terms of both kinds. With the part's
            # number of items, and weighed by its share then, it is right whatever it is.
            partial = items if items is None or weight in (0.0, 1.0) else items * weight
            with self.apart():
                seed_step(streams, given.batch.number, self.job.world.rank)
                loss = self._pass(inputs, partial)
            # What it returns is logged, however many backward passes it has made.
            self._passed.note(given)
            given.objective = given.objective + loss.detach().float().sum() * weight
            return loss
        finally:
            self._given = None

    def look(self, loss: Any) -> None:
        """The trainer makes a pass of this loss, or evaluates."""
        if self._given is not None:
            self._weighed.look(loss, len(self._given.part.indices))

    def _backward(self, own: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        if self._given is not None:
            self._passed.made = True
            self._weighed.require()
            loss = loss if self._weight == 1.0 else loss * self._weight
        with self._begun.state.hooks.aside() if self._given is not None else contextlib.nullcontext():
            own(loss, **kwargs)
        self._weighed.note()

    # -- a step that is torn --

    def take_back(self) -> None: ...

    def give_back(self) -> None: ...

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        self._weighed.begin()
        self._passed.begin()
        self._items.count_again([piece.content for _, pieces in open_batches for piece in pieces])

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        self._run(given, weight, sample, self._items.total)

    def cannot_remake(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        raise error

    def rejoin(self, why: str) -> None:
        """The present world broke."""
        self._begun.leave(WorldBroken(why))
        self.tell_rank()

    # -- between steps --

    def settle(self) -> None:
        """Callbacks have said what is to be done after a step, or an epoch."""
        self._step_at = None
        self.decisions.settle(self._trainer.control, is_catching_up=self.is_catching_up)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is drawn within is this worker's. Whatever else a script draws, as in a callback, all workers draw alike."""
        outside = RandomStreams.capture()
        try:
            yield
        finally:
            RandomStreams.restore(outside)

    def note_resumed(self) -> None:
        """The random streams have been set, to those of a checkpoint."""
        self._place.outside = RandomStreams.capture()

    def advance(self) -> None:
        self.job.advance(Activity.ALIVE)

    def end_of_training(self) -> None:
        """There is no further step."""
        if self.is_catching_up and self._place.received is not None:
            self._arrive()
        self._place.note(NO_EPOCH, 0)
        self._passed.begin()
        self._begun.state.last_step_made()

    def finish(self) -> LoopState | None:
        """Return when the scripts of all workers are done; the state that they end with, if there is one."""
        steps = self._steps
        if steps is None:
            return None
        if steps.is_catching_up:
            self._arrive()
        return steps.state if steps.end() else None
