"""What a ``transformers.Trainer`` adds to a participant: how a pass is made, where the trainer stands, who writes.

The trainer believes that it is alone, with the global batch. It takes all batches of a step first, and makes a forward and
a backward pass of each then. After the last of these the gradients are summed, before it looks at them.

And its place in the data, and what all workers decide alike.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy.typing as npt
import torch
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerState

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import MicroBatch, Progress
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.agreements import ScriptPosition
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OpenBatch, OwnLoader, SubBatch
from elasticdl.elastic.torch_kit.participant import MovableHost, Outcome, Participant, TrainerPlace
from elasticdl.elastic.torch_kit.passes import Remedy
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.refusals import refuse_new_groups
from elasticdl.elastic.torch_kit.tensors import ElasticContext, RandomStreams, marks_of, refuse_others
from elasticdl.elastic.torch_kit.torch_state import holders_of_callbacks
from elasticdl.elastic.training.data_facts import EVALUATION, named_sources

log = logging.getLogger(__name__)

# Where a trainer stands between two steps: what a worker that comes later must know beside model, optimizer and scheduler.

# Of `TrainerState`: what each worker knows of itself.
OWN = ("is_local_process_zero", "is_world_process_zero")
# And what it measures or counts itself, or what is compared elsewhere.
OF_EACH_WORKER = ("log_history", "total_flos", "num_input_tokens_seen", "stateful_callbacks", "best_model_checkpoint")


class TrainerSnapshot(TrainerPlace):
    """See `elasticdl.elastic.torch_kit.participant.TrainerPlace`."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._noted: dict[str, Any] = {}  # what the trainer changes while it makes a step, which may be torn

    def note(self, epoch: int, batch: int) -> None:
        super().note(epoch, batch)
        trainer = self._trainer
        self._noted = {
            "loss": trainer._tr_loss.clone(),  # since the last log
            "total_loss": trainer._total_loss_scalar,  # before that
            "logged_at": trainer._globalstep_last_logged,
            "initial_step": trainer._initial_global_step,
        }

    def done(self) -> Progress | None:
        """Where the trainer begins, if not at the beginning."""
        args, step = self._trainer.args, self._trainer.state.global_step
        size = args.train_batch_size
        made = step * size * args.gradient_accumulation_steps
        return Progress(self.epoch, self.batch * size, step, made) if step else None

    def compared(self) -> dict[str, Any]:
        if self.received is not None:
            return {}
        held = self.dump()
        state = {name: value for name, value in held["state"].items() if name not in OF_EACH_WORKER}
        names = [type(each).__name__ for each in _stateful(self._trainer)]
        return {
            "trainer": {**state, "control": held["control"]},
            "callbacks": dict(zip(names, held["callbacks"], strict=True)),
            **RandomStreams.compared(held["outside"]),
        }

    def read(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {each.name: getattr(trainer.state, each.name) for each in fields(TrainerState) if each.name not in OWN}
        return {
            **self._noted,
            "loss": self._noted["loss"].item(),
            "state": state,
            "control": asdict(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in _stateful(trainer)],
        }

    def apply(self, numbers: dict[str, Any]) -> None:
        trainer = self._trainer
        own = {name: getattr(trainer.state, name) for name in OWN}
        trainer.state = TrainerState(**numbers["state"], **own)
        vars(trainer.control).update(numbers["control"])
        for callback, attributes in zip(_stateful(trainer), numbers["callbacks"], strict=False):
            vars(callback).update(attributes)
        trainer._tr_loss.fill_(numbers["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = numbers["total_loss"], numbers["logged_at"]
        trainer._initial_global_step = numbers["initial_step"]


def _stateful(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


# What a trainer does next, by ``TrainerControl``. Callbacks decide alike on all workers, by the step, by what is logged, or by an evaluation.

STOPS = ("should_training_stop", "should_epoch_stop")
FLAGS = (*STOPS, "should_save", "should_evaluate", "should_log")

DIFFER = (
    "training_step made gradients of a batch on some workers and none on others, as it went by what is in this worker's part: go by the step "
    "or the epoch, or give the batch to accelerator.backward on all workers, its loss multiplied by zero where it is not to count"
)

STOPS_WITHIN = "a callback stops training between two batches of a step, of which other workers make the rest: let it do so in on_step_end"

# A forward pass draws from another stream than what loads its batch.
FORWARD = b"forward"

PACKAGES = ("transformers", "accelerate", "elasticdl")  # whose callbacks keep nothing that must travel
# Where transformers has its callbacks for TensorBoard and the like.
REPORTS = "transformers.integrations."

REMEDY = Remedy("accelerator.backward(loss)", "in on_pre_optimizer_step")
OWN_OPTIMIZER = "have create_optimizer make one of all parameters, these in a group of their own"

WAIT_SECONDS, POLL_SECONDS = 600.0, 0.05  # of a worker for the checkpoint that another writes
LAST_FILE = "trainer_state.json"  # the file of a checkpoint that is written last


def is_whole(checkpoint: str) -> bool:
    return os.path.exists(os.path.join(checkpoint, LAST_FILE))


# How many items, such as tokens, some inputs have.
Count = Callable[[list[Any]], Any]
# Makes the gradients of some inputs, given the number of items in the step's batches, and returns the loss.
Pass = Callable[[Any, Any], torch.Tensor]


class TrainerHost(MovableHost):
    """One call of `train`, from the trainer's preparation to the end of the script."""

    _place: TrainerSnapshot

    def __init__(self, trainer: Any, job: ElasticContext, on_left: Callable[[], None]) -> None:
        super().__init__(job, on_left, TrainerSnapshot(trainer))
        self._trainer = trainer
        self._iterator: Iterator[Any] | None = None  # over the present epoch
        self._is_in_step = False  # of which the trainer has a batch
        self._passes = 0  # made in this step
        self._given: OpenBatch | None = None  # that the present pass is made on
        self._weight = 1.0
        self._reported: torch.Tensor | float = 0.0  # of the step's loss
        # Of the step: by this number the trainer divides the sum of their losses; None if it does not count them.
        self._items: Any = None
        self._count: Count | None = None
        self._pass: Pass | None = None
        self._was_first: bool | None = None  # None: training has not begun
        # The checkpoint that the first worker writes since the last step, and what writes it.
        self.unwritten: tuple[str, Callable[[], None]] | None = None
        self._ended_with: list[int] | None = None  # marks of the parameters, if that checkpoint is of the last step

    # -- who writes --

    def rank_known(self) -> None:
        """Tell the trainer's callbacks."""
        if self._was_first is None:
            return
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

    def wait_for(self, checkpoint: str) -> None:
        """Until it is there, or has not come for long."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_whole(checkpoint) and time.monotonic() < deadline:
            self.job.advance(Activity.WAIT)
            if self.job.world_is_broken:
                self.participant.leave(WorldBroken("the world broke before the best checkpoint was there"))
            self._make_up()
            time.sleep(POLL_SECONDS)
        self.job.advance(Activity.ALIVE)

    def _make_up(self) -> None:
        """Who was the first worker has written its checkpoint, unless this one is now: it writes that again, if the parameters are still the same."""
        if self.unwritten is not None and self.is_first:
            (checkpoint, write), self.unwritten = self.unwritten, None
            if not is_whole(checkpoint):
                write()

    def _marks(self) -> list[int] | None:
        return marks_of([*self._trainer.model.parameters()])() if self.unwritten is not None else None

    def end_of_training(self) -> None:
        super().end_of_training()
        self._ended_with = self._marks()

    def world_at_end(self) -> None:
        if self._marks() == self._ended_with:
            self._make_up()

    # -- the beginning --

    @property
    def has_begun(self) -> bool:
        return self._joined is not None

    def begin_at(self, epoch: int, batch: int) -> None:
        """The trainer begins there, as it resumes from a checkpoint perhaps."""
        trainer = self._trainer
        trainer._tr_loss, trainer._total_loss_scalar = torch.tensor(0.0, device=trainer.args.device), 0.0
        trainer._globalstep_last_logged = trainer._initial_global_step = trainer.state.global_step
        self._place.note(epoch, batch)

    def begin(self, loader: Any) -> None:
        """Be in a world; the trainer has prepared model, optimizer and scheduler."""
        trainer = self._trainer
        data = OwnLoader(loader, "elastic.transformers")
        values = {"scheduler": trainer.lr_scheduler, "trainer": self._place, "place": ScriptPosition()}
        if trainer.accelerator.scaler is not None:
            values["scaler"] = trainer.accelerator.scaler
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state = LoopState(self.job, trainer.model, optimizer, values, remedy=REMEDY)
        callbacks = [each for each in trainer.callback_handler.callbacks if not isinstance(each, ExportableState)]
        state.attributes.add(*holders_of_callbacks(callbacks, PACKAGES, "make the callback an ExportableState"))
        state.sources += [data.source, *named_sources(EVALUATION, trainer.eval_dataset)]
        state.batches = data
        if done := self._place.done():  # by a checkpoint that the trainer has loaded
            self.job.loaded(done)
        participant = Participant(self.job, state, self, values["place"], data)
        trainer.accelerator.backward = functools.partial(self._backward, trainer.accelerator.backward)
        self._step_together(trainer.optimizer)
        if self.job.under_master:
            refuse_others(optimizer, lambda: self._is_in_step, OWN_OPTIMIZER)
            refuse_new_groups(optimizer, OWN_OPTIMIZER)
        begins = self._place.epoch, self._place.batch
        self.join(participant)
        received = self._place.received
        if received and self.job.world.is_first and (received["epoch"], received["batch"]) == begins:
            # A worker of the first world stands where all do. Arriving later would undo what its callbacks draw at random.
            participant.arrive()
        self._was_first = self.is_first
        self.rank_known()

    def _step_together(self, optimizer: Any) -> None:
        own = optimizer.step

        @functools.wraps(own)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_catching_up:  # the others have made this step
                return None
            result = own(*args, **kwargs)
            self.participant.close()
            return result

        optimizer.step = types.MethodType(step, optimizer)

    # -- an epoch --

    def go_to(self, epoch: int, first: int = 0) -> int | None:
        self._iterator, arrives = None, self.is_catching_up
        begins = super().go_to(epoch, first)
        if begins is None:  # the next one begins for callbacks as it began for those of the others
            self._trainer.state.epoch = float(epoch + 1)
        return None if arrives and self._trainer.control.should_training_stop else begins

    def present(self) -> Iterator[Any]:
        """The batches of the present epoch that are to come."""
        if self._iterator is None:
            self._tell_samplers(self._begins[0])
            self._iterator = self.take()
        return self._iterator

    def _tell_samplers(self, epoch: int) -> None:
        assert self.participant.data is not None, "it was given to the participant"
        loader = self.participant.data.loader
        counting: list[Any] = [loader, getattr(loader.batch_sampler, "batch_sampler", None)]
        for each in counting:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def opened(self, batch: GlobalBatch, part: MicroBatch, sample: Any) -> OpenBatch:
        if not self.participant.open_batches:
            self._is_in_step = True
            self._passes, self._reported, self._items = 0, 0.0, None
        return OpenBatch(batch, part, sample)

    # -- a step --

    def count(self, samples: list[Any], count: Count) -> Any:
        """Of items such as tokens in the batches that were taken; None if the trainer does not count them."""
        self._count, self._items = count, count(samples)
        open_batches = self.participant.open_batches
        if open_batches and self.job.size > 1:
            self._count_together(
                [each for each, given in zip(samples, open_batches, strict=True) if given.part.samples]
            )
        return self._items

    def _count_together(self, samples: list[Any]) -> None:
        """The items that all workers have in their ``samples``."""
        if self._items is None or self._count is None:
            return
        total = torch.tensor([float(self._count(samples)) if samples else 0.0], dtype=torch.float64)
        with self.job.waiting(Activity.COMPUTE):
            try:
                self.job.collective.sum_([total], "elasticdl.items")
            except WorldBroken as failure:
                log.info("items are counted again: %s", failure)  # as the step that follows is torn
                total.fill_(1.0)
        self._items = total.to(self._items)[0] if torch.is_tensor(self._items) else float(total)

    def make_pass(self, inputs: Any, items: Any, run: Pass) -> torch.Tensor:
        """Forward and backward of one batch; after the last of the step, gradients are everybody's. Returns the loss."""
        participant = self.participant
        self._pass = run
        if (
            not participant.open_batches or participant.is_reduced
        ):  # the trainer does what is not on a batch of its loader
            return run(inputs, items)
        given = participant.open_batches[self._passes]
        self._passes += 1
        if self.job.size > 1:
            given.noted = participant.state.attributes.note()
        loss = self._run(given, given.part.weight, inputs, items)
        world = self.job.world
        if self._passes < len(participant.open_batches):
            if world.size > 1:  # the whole step's comes with its last batch
                return torch.zeros_like(loss)
            self._reported = self._reported + loss
            return loss
        outcome = participant.settle()
        self._make_up()
        self.unwritten = None
        vote = participant.state.vote
        if outcome is Outcome.BEHIND or vote is None or (world.size == 1 and self.job.world.version == world.version):
            return loss
        return torch.full_like(loss, vote.loss) - self._reported

    def _run(self, given: OpenBatch, weight: float, inputs: Any, items: Any) -> torch.Tensor:
        assert self._pass is not None, "a pass was made"
        self._given, self._weight = given, weight
        participant = self.participant
        try:
            # A loss is a sum over items by their number, or a mean over samples, or has terms of both kinds. With the part's
            # number of items, and weighed by its share then, it is right whatever it is.
            partial = items if items is None or weight in (0.0, 1.0) else items * weight
            with participant.apart(given.batch, FORWARD):
                loss = self._pass(inputs, partial)
            # What it returns is logged, however many backward passes it has made.
            given.add_loss(loss, weight)
            return loss
        finally:
            self._given = None

    def look(self, loss: Any) -> None:
        """The trainer makes a pass of this loss, or evaluates."""
        if self._given is not None:
            self.participant.state.reducer.weighed.look(loss, len(self._given.part.indices))

    def _backward(self, own: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        if self._given is not None:
            self._given.backwards += 1
            self._given.begin_loss(loss)
            loss = loss if self._weight == 1.0 else loss * self._weight
        if self._given is None:
            own(loss, **kwargs)
        else:
            participant = self.participant
            is_last = self._passes == len(participant.open_batches) and not participant.is_torn
            participant.state.reducer.backward(functools.partial(own, loss, **kwargs), last=is_last)

    def rides(self) -> Mapping[str, npt.ArrayLike]:
        # Of which batches this worker has made gradients, and of which it has not; without a sample of its own it is as another worker.
        passes = [
            [float(given.backwards > 0), float(given.backwards == 0)] if given.part.samples else [0.0, 0.0]
            for given in self.participant.open_batches
        ]
        return {"passes": passes}

    def heard(self, rides: Rides) -> None:
        if self.job.size > 1 and bool(rides["passes"].all(axis=1).any()):
            raise UserError(DIFFER)

    # -- a step that is torn --

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        for given, _ in open_batches:
            given.backwards = 0
        self._count_together([piece.content for _, pieces in open_batches for piece in pieces])

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        self._run(given, weight, sample, self._items)

    # -- between steps --

    def leave_step(self) -> None:
        """Callbacks have said what is to be done after a step, or an epoch."""
        self._is_in_step = False
        if self.job.size > 1 and self.participant.open_batches and not self.participant.is_reduced:
            raise UserError(STOPS_WITHIN)

    def decide_alike(self) -> None:
        """The trainer has evaluated: of metrics that differ by rounding, rank 0's decide. If that worker was told to leave, the others go on."""
        control, leaves = self._trainer.control, self.job.is_told_to_leave
        own = {name: getattr(control, name) and not (leaves and name in STOPS) for name in FLAGS}
        vars(control).update(self.participant.agreements.of_first(own) or own)

    def note_resumed(self) -> None:
        """The random streams have been set, to those of a checkpoint."""
        self._place.outside = RandomStreams.capture()

    def advance(self) -> None:
        self.job.advance(Activity.ALIVE)
