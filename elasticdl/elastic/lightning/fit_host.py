"""What ``Trainer.fit`` adds to a participant: how a training step is run, where the loops stand, who writes.

With it the training state, what all workers answer alike, and what is refused of a trainer.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt
import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import MicroBatch, Progress
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.lightning import inside
from elasticdl.elastic.lightning.inside import GivenBatch, Logged, Part, TrainerState
from elasticdl.elastic.lightning.manual import Gradients, Manual
from elasticdl.elastic.torch_kit.agreements import ScriptPosition
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OpenBatch, OwnLoader, SubBatch
from elasticdl.elastic.torch_kit.participant import MovableHost, Outcome, Participant
from elasticdl.elastic.torch_kit.passes import Remedy
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.refusals import (
    TRAINS_ONCE,
    refuse,
    refuse_new_groups,
    require_plain,
)
from elasticdl.elastic.torch_kit.tensors import ElasticContext, refuse_others
from elasticdl.elastic.torch_kit.torch_state import holders_of_callbacks
from elasticdl.elastic.training.attributes import Holder
from elasticdl.elastic.training.kept_state import require_origin
from elasticdl.elastic.training.runtime import ScriptRuntime

LIGHTNINGS = ("lightning", "pytorch_lightning")
PACKAGES = (*LIGHTNINGS, "lightning_fabric", "elasticdl")  # whose callbacks have a state of their own

# The training state of a script that calls ``Trainer.fit``, with automatic and with manual optimization.


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The script's own callbacks that have no ``state_dict``. Lightning's have one, or need none."""
    stateless = [callback for callback in trainer.callbacks if not callback.state_dict()]
    return holders_of_callbacks(stateless, PACKAGES, "give the callback state_dict and load_state_dict")


def of_lightning(module: Any) -> frozenset[str]:
    """Attributes that each module has of Lightning."""
    plain = next(each for each in type(module).__mro__ if each.__module__.partition(".")[0] in PACKAGES)()
    return frozenset({*vars(plain), "_hparams"})  # which Lightning gives to each that has none


# What can't be had of a trainer of Lightning or its module with workers that come and go: each is refused in one line.

WHO = 'Trainer(strategy="elastic")'
LEFT_OUT = (
    "training_step returned None for a part of a batch on some workers and a loss on others, as it went by what is in this worker's part: go by "
    "the batch's number or the epoch, or return a loss of each part, multiplied by zero where it is not to count"
)
REMEDY = Remedy("the loss of training_step", "in on_before_optimizer_step")
OWN_OPTIMIZER = "have configure_optimizers return it, its parameters as a group of the one optimizer, or several optimizers with manual optimization"

# Callbacks; of either of Lightning's packages.
CANT_BE_HAD = {
    **dict.fromkeys(
        ("LearningRateFinder", "BatchSizeFinder"),
        f"{TRAINS_ONCE} under `elasticdl run`: let the script run alone to find the value, and write that into it",
    ),
    "StochasticWeightAveraging": "exchanges the scheduler while it trains, and a worker that comes later would keep the first one: leave it out "
    "under `elasticdl run`",
}


def of_callbacks(trainer: Any) -> Iterator[str]:
    """Those, which may be a Tuner's, that train before the training, or change what newcomers can't be sent."""
    kinds = (kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__)
    return (f"{name} {CANT_BE_HAD[name]}" for name in kinds if name in CANT_BE_HAD)


def require_module(module: Any, optimizers: list[Any]) -> None:
    """Raises:
    UserError: the module trains in a way that can't be had.
    """
    if not any(each.param_groups for each in optimizers):  # for None Lightning has one that does nothing
        refuse(WHO, ["configure_optimizers returns no optimizer; expected one"])
    for optimizer in optimizers:
        require_plain(module, optimizer, WHO)


# What rank 0 alone does, whichever worker that is: it writes files, shows the progress bar, and tells the job of validations and checkpoints.

# Before there is a world nobody writes: which worker is to do that is not known.
NOBODY = 1


class Writing:
    """Tells Lightning of this worker's rank."""

    def __init__(self, trainer: Any, rank_zero_only: Any) -> None:
        self.rank = NOBODY
        self._trainer = trainer
        self._rank_zero_only = rank_zero_only
        rank_zero_only.rank = NOBODY

    def take_rank(self, rank: int, *, is_first: bool, goes_on: bool = False) -> None:
        """``is_first``: the world is the job's first. ``goes_on``: with the training of an earlier job, which has written files."""
        if rank == self.rank:
            return
        self.rank = self._rank_zero_only.rank = rank
        if rank == 0:
            if goes_on or not is_first:
                self._put_files_aside()
            if is_first:
                self._say_what_was_not_said()

    def stop(self) -> None:
        """This worker leaves; another writes from now on."""
        if self.rank == 0:
            for logger in self._trainer.loggers:
                logger.save()
        self.rank = self._rank_zero_only.rank = NOBODY

    def _say_what_was_not_said(self) -> None:
        """What Lightning has rank 0 write before the loops begin."""
        trainer = self._trainer
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.enable()
        for callback in trainer.callbacks:
            if any(kind.__name__ == "ModelSummary" for kind in type(callback).__mro__):
                callback.on_fit_start(trainer, trainer.lightning_module)
        inside.log_hyperparameters(trainer)

    def _put_files_aside(self) -> None:
        """A CSVLogger that begins would remove what the last rank 0 has written."""
        for logger in self._trainer.loggers:
            path = Path(getattr(logger, "log_dir", None) or "", "metrics.csv")
            if any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__) and path.is_file():
                free = (path.with_stem(f"metrics_{number}") for number in count())
                path.rename(next(each for each in free if not each.exists()))


class Told:
    """So that their time does not count as training."""

    def __init__(self, trainer: Any, job: ElasticContext) -> None:
        self._trainer = trainer
        self._job = job
        self._began = 0.0
        self._before: dict[str, Any] = {}  # metrics

    def validation_begins(self) -> None:
        self._began, self._before = time.monotonic(), dict(self._trainer.callback_metrics)

    def validation_ends(self) -> None:
        trainer = self._trainer
        if trainer.is_global_zero and not trainer.sanity_checking:
            found = trainer.callback_metrics.items()
            metrics = {name: float(value) for name, value in found if value is not self._before.get(name)}
            about = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            self._job.tell_work("evaluation", **about, metrics=metrics, seconds=time.monotonic() - self._began)

    def saved(self, path: str, seconds: float) -> None:
        if self._trainer.is_global_zero:
            step = self._trainer.global_step
            self._job.tell_work("checkpoint", step=step, path=path, seconds=seconds, held=seconds)


# What moves a batch to its device draws from another stream than what loads it, and so does a training step.
MOVING, FORWARD = b"moving", b"forward"


class FitHost(MovableHost):
    """Between a trainer's loops and the `Participant` of the job."""

    _place: TrainerState

    def __init__(
        self, trainer: Any, runtime: ScriptRuntime[ElasticContext], job: ElasticContext, writing: Writing
    ) -> None:
        self._logged = Logged(job, trainer)
        super().__init__(job, runtime.leave, TrainerState(job, trainer, self._logged))
        self._trainer = trainer
        self._runtime = runtime
        self._writing = writing
        self.told = Told(trainer, job)
        self._knows_files = False  # where the others have written
        self._given: GivenBatch | None = None  # the batch in hand; before the first one the others may not be there
        self._moves_by_hooks = False  # of the script
        self._on_sigterm: Any = None
        self._manual: Manual | None = None  # if the module's training step makes its own updates

    @property
    def is_manual(self) -> bool:
        return self._manual is not None

    @property
    def is_sending(self) -> bool:
        """Whether Lightning's checkpoint is asked for on behalf of another worker, or of what `elasticdl stop` keeps."""
        return self._place.is_reading

    @property
    def is_making(self) -> bool:
        """Whether gradients that are made now count."""
        joined = self._joined
        return joined is not None and not joined.is_catching_up and bool(joined.open_batches)

    # -- the beginning --

    def begin(self) -> None:
        """Lightning has restored all that the script asks for; its loops are to run."""
        if self._joined is not None:
            return
        trainer = self._trainer
        self._place.begin()
        schedulers = {f"scheduler_{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        place = ScriptPosition()
        values = {"place": place, "trainer": self._place, **schedulers, **({"scaler": scaler} if scaler else {})}
        module, optimizer = trainer.lightning_module, trainer.optimizers[0]
        if not module.automatic_optimization:
            self._manual = manual = Manual(trainer, self.job)
            optimizer = manual.optimizers
            values["gradients"] = Gradients(lambda: manual.optimizers.parameters)
        state = LoopState(self.job, module, optimizer, values, remedy=REMEDY, updates_within=self.is_manual)
        state.attributes.foreign = of_lightning(module)
        state.attributes.add(*holders_of(trainer))
        if trainer.global_step:  # of a checkpoint that the script has named
            self.job.loaded(Progress(trainer.current_epoch, 0, trainer.global_step))
        hooks = (module.transfer_batch_to_device, module.on_after_batch_transfer, trainer.datamodule)
        self._moves_by_hooks = not all(_is_lightnings(each) for each in hooks if each is not None)
        self._runtime.train_in_place(self.finish)
        self.join(Participant(self.job, state, self, place, in_pieces=not self.is_manual))
        if self.job.under_master:
            refuse_others(state.optimizer, lambda: self._is_in_batch, OWN_OPTIMIZER)
            refuse_new_groups(
                state.optimizer, "give all parameters in configure_optimizers, and freeze those that are to train later"
            )
        if self.is_catching_up and not self._place.enter(self.participant.state.weights):
            self.participant.arrive()  # or hooks would draw what is not the script's
        self._knows_files = True
        self.rank_known()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def keep_sigterm(self) -> None:
        """Lightning has set its own handler, which would end the loops with an error."""
        if self.job.under_master and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    # -- for the loader --

    def epoch(self, data: OwnLoader) -> Iterator[Any]:
        """The batches of the present epoch that are to be trained on."""
        participant = self.participant
        state = participant.state
        participant.data = state.batches = data
        state.sources = [data.source]
        if self.is_catching_up and state.resumed is not None:
            require_origin(*state.resumed, state.origin, state.progress.position)
        first = self.go_to(self._trainer.current_epoch)
        if first is not None:
            inside.begin_with(self._trainer, first)
            yield from self.take(data.order_of)

    def asks_for(self, batch: GlobalBatch) -> bool:
        # Lightning clears gradients of which no step was made.
        trainer = self._trainer
        begins_step = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        return begins_step and bool(self.participant.open_batches)

    def opened(self, batch: GlobalBatch, part: MicroBatch, sample: Any) -> OpenBatch:
        self._given = GivenBatch(batch, part, index=self._trainer.fit_loop.epoch_loop.batch_idx + 1)
        return self._given

    def moving(self) -> AbstractContextManager[None]:
        """Around the hooks that move a batch to its device, for training or not. If they are the script's, they may draw."""
        if not self._trainer.training:
            self.job.advance(Activity.ALIVE)
            return nullcontext()
        if not self._moves_by_hooks or self._given is None or not self.is_making:
            return nullcontext()
        return self.participant.apart(self._given.batch, MOVING)

    # -- a step --

    def training_step(self, run: Callable[[], Any]) -> Any:
        given = self._given if self.is_making else None
        if given is None:
            return run()
        given.asked = self.participant.position.answers.asked
        given.noted = self.participant.state.attributes.note() if self.job.size > 1 else None
        part = Part(given.part.weight, len(given.part.indices), given.part.samples)
        if self._manual:
            return self._make_manually(self._manual, given, part, run)
        result = self._run(given, part, run)
        self.participant.state.reducer.weighed.look(loss_of(result), part.loaded)
        given.left_out = part.samples if result is None else 0
        return result

    def _run(self, given: GivenBatch, part: Part, run: Callable[[], Any]) -> Any:
        """The training step on a part of a batch."""
        collects = not self.job.is_alone or self.participant.is_torn
        with (
            self.participant.apart(given.batch, FORWARD),
            self._logged.collecting(given, part) if collects else nullcontext(),
        ):
            return run()

    def _make_manually(self, manual: Manual, given: GivenBatch, part: Part, run: Callable[[], Any]) -> Any:
        manual.begin_step()
        failure = None
        try:
            if not self.participant.is_torn:  # by a question before it; then it is run for the new world
                self._run(given, part, functools.partial(manual.run, run))
        except WorldBroken as error:
            failure = error
        self._reduce(failure)
        if self.participant.is_reduced:
            manual.optimizers.made()
            manual.has_trained = True
            self.participant.close()
        return manual.take_output()

    def backward(self, loss: torch.Tensor, scaled: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """``scaled``: of which ``run`` makes gradients; the loss itself unless there is a GradScaler."""
        given = self._given
        assert given is not None, "a batch is in hand"
        if self._manual is not None:
            # Each pass is summed by itself.
            self._manual.sum(lambda: self._backward(given, given.part.weight, loss, scaled, run))
            return
        is_last = not inside.accumulates(self._trainer)
        self._backward(given, given.part.weight, loss, scaled, run, last=is_last)
        if is_last:
            self._reduce()

    def _backward(
        self,
        given: OpenBatch,
        weight: float,
        loss: torch.Tensor,
        scaled: torch.Tensor,
        run: Callable[..., Any],
        *,
        last: bool = False,
    ) -> None:
        self.participant.backward(given, weight, loss, lambda factor: run(scaled * factor), last=last)

    def is_to_update(self) -> bool:
        """Whether the optimizer may step now that the closure was evaluated."""
        if not self.is_making:
            return False
        if not self.participant.is_reduced:  # as the training step was skipped, no backward has done it
            with torch.enable_grad():
                self._reduce()
        return not self.participant.is_catching_up

    def rides(self) -> Mapping[str, npt.ArrayLike]:
        return {"left out": [given.left_out for given in self._open_batches], **self._logged.rides(self._open_batches)}

    def heard(self, rides: Rides) -> None:
        for given, left_out in zip(self._open_batches, rides["left out"], strict=True):
            if 0 < left_out < len(given.batch.indices):
                raise UserError(LEFT_OUT)
        self._logged.heard(rides, self._open_batches)

    # -- what workers say to each other; a training step that is manual is begun again --

    def of_first(self, value: Any) -> Any:
        """Rank 0's value, on all workers."""
        if self._given is None:
            return value
        return self.participant.agreements.of_first(value, "a decision", mends=not self.is_manual)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the workers."""
        if self._given is None or not torch.is_floating_point(tensor):
            return tensor
        return self.participant.agreements.mean(tensor, "a mean", mends=not self.is_manual)

    # -- a step that is torn --

    @contextlib.contextmanager
    def as_before_step(self) -> Iterator[None]:
        if self._manual is not None:
            # A newcomer begins the whole training step, in which other parameters may be trained by now.
            self._manual.begin_again()
        yield

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        for given in self._open_batches:
            given.logged.clear()
            given.left_out = 0
        if self._manual is not None:
            self._manual.begin_again()

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        assert isinstance(given, GivenBatch)
        trainer, answers, self._given = self._trainer, self.participant.position.answers, given
        samples = round(weight * len(given.batch.indices))
        part = Part(weight, samples or len(given.part.indices), samples)
        asked, answers.asked = answers.asked, given.asked  # which are the same once more
        try:
            with inside.moved(trainer, sample) as moved:
                again = functools.partial(trainer.strategy.step_again, moved, given.index)
                result = self._run(given, part, functools.partial(self._manual.run, again) if self._manual else again)
        finally:
            answers.asked = max(asked, answers.asked)
        if self._manual is not None:
            return
        loss = loss_of(result)
        if loss is None:
            given.left_out += part.samples
            return
        loss = loss / trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = loss if scaler is None else scaler.scale(loss)
        self._backward(given, weight, loss, scaled, trainer.lightning_module.backward)

    # -- the end --

    def ended(self) -> None:
        """The loops are done."""
        self._logged.end()
        if self._manual is not None:
            self._manual.close()
        self.end_of_training()

    def finish(self) -> LoopState | None:
        if self._joined is not None and self._open_batches and not self.participant.is_reduced:
            self.participant.close()
        return super().finish()

    def left(self) -> None:
        self._given = None
        self._writing.stop()
        super().left()

    # -- details --

    @property
    def _is_in_batch(self) -> bool:
        """From its hooks to the end of them."""
        trainer = self._trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(trainer.training and batches.ready > batches.completed)

    def _reduce(self, failure: WorldBroken | None = None) -> None:
        if self.participant.settle(failure) is Outcome.MADE:
            self._logged.apply()

    @property
    def _open_batches(self) -> list[GivenBatch]:
        return cast(list[GivenBatch], self.participant.open_batches)

    # -- worlds --

    def rank_known(self) -> None:
        """Files are written by rank 0 alone."""
        if not self._knows_files:
            return
        goes_on = self.is_catching_up or self.participant.state.resumed is not None
        inside = self.job.inside
        rank = self.job.rank * inside.size + inside.rank
        self._writing.take_rank(rank, is_first=self.job.world.is_first, goes_on=goes_on)


def loss_of(output: Any) -> Any:
    """What a training step with automatic optimization returns: a loss, None, or a dict with a loss."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _is_lightnings(each: Any) -> bool:
    return (each.__module__ or "").partition(".")[0] in LIGHTNINGS
