"""What ``Trainer.fit`` adds to a participant: how a training step is run, where the loops stand, who writes."""

from __future__ import annotations

import functools
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy.typing as npt
import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.interruptions import WorldBroken
from elasticdl.elastic.core.plan import MicroBatch
from elasticdl.elastic.lightning.decisions import Decisions
from elasticdl.elastic.lightning.fit_state import FitState, ManualState, holders_of
from elasticdl.elastic.lightning.logged import GivenBatch, Logged
from elasticdl.elastic.lightning.manual import Manual
from elasticdl.elastic.lightning.requirements import OWN_OPTIMIZER, SECOND_PASS
from elasticdl.elastic.lightning.stopping import Stopping
from elasticdl.elastic.lightning.trainer_state import PACKAGES, TrainerState, Window, begin_epoch_as_others
from elasticdl.elastic.lightning.writing import Told, Writing
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch, OwnLoader
from elasticdl.elastic.torch_kit.own_optimizers import OwnOptimizers
from elasticdl.elastic.torch_kit.participant.host import OpenBatch, Outcome, SubBatch
from elasticdl.elastic.torch_kit.participant.joined import JoinedHost
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState
from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.participant.script_position import ScriptPosition
from elasticdl.elastic.torch_kit.reduction.rides import Rides
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.kept_state import require_origin
from elasticdl.elastic.training.runtime import ScriptRuntime


class FitHost(JoinedHost):
    """Between a trainer's loops and the `Participant` of the job."""

    def __init__(
        self, trainer: Any, runtime: ScriptRuntime[ElasticContext], job: ElasticContext, writing: Writing
    ) -> None:
        super().__init__(job, runtime.leave)
        self._trainer = trainer
        self._runtime = runtime
        self._writing = writing
        self.decisions = Decisions(job)
        self.told = Told(trainer, job)
        self._stopping: Stopping | None = None  # from the beginning of the loops
        self._is_newcomer = False  # its loops begin where the job stands
        self._given: GivenBatch | None = None
        self._logged = Logged(job, trainer)
        self.window = Window()
        self._epoch_begins = (b"", b"")  # with these streams, and what else its order is drawn from
        self._on_sigterm: Any = None
        self._weighed = self.weighed("the loss of training_step", "in on_before_optimizer_step")
        self._manual: Manual | None = None  # if the module's training step makes its own updates

    @property
    def is_manual(self) -> bool:
        return self._manual is not None

    @property
    def is_making(self) -> bool:
        """Whether gradients that are made now count."""
        joined = self._joined
        return joined is not None and not joined.is_catching_up and bool(joined.open_batches)

    # -- the beginning --

    def join(self) -> None:
        """Lightning has restored all that the script asks for; its loops are to run."""
        if self._joined is not None:
            return
        trainer = self._trainer
        self.trainer_state = TrainerState(trainer, self._logged)
        schedulers = {f"scheduler_{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        place = ScriptPosition()
        values = {"place": place, "trainer": self.trainer_state, **schedulers, **({"scaler": scaler} if scaler else {})}
        state = self._make_state(values)
        state.attributes.add(*holders_of(trainer), packages=PACKAGES)
        state.begin_where(trainer)
        self._joined = participant = Participant(self.job, state, self, place, in_pieces=not self.is_manual)
        self._runtime.train_in_place(self.finish)
        participant.join()
        self._stopping = Stopping(trainer, self.decisions)
        if self.job.under_master:
            OwnOptimizers(trainer.lightning_module, state.optimizer, self._batch_in_work, OWN_OPTIMIZER)
        if participant.is_catching_up:
            self._is_newcomer = True
            # The order of samples is that of the others.
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended before the epoch ended"
            )
            self.trainer_state.enter()  # after which it is known where the others have written
        self.rank_known()
        if threading.current_thread() is threading.main_thread():
            self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def _make_state(self, values: dict[str, Any]) -> FitState:
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return FitState(self.job, module, self._trainer.optimizers[0], values)
        self._manual = Manual(self._trainer, self.job)
        self.decisions.is_manual = True
        return ManualState(self.job, module, self._manual.optimizers, values)

    def keep_sigterm(self) -> None:
        """Lightning has set its own handler, which would end the loops with an error."""
        if self._on_sigterm is not None and self.job.under_master:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    # -- for the loader --

    def begin_epoch(self, data: OwnLoader) -> int:
        """The order of the present epoch is drawn. Returns the number of the batch that comes next."""
        trainer, participant = self._trainer, self.participant
        participant.data = participant.state.batches = data
        participant.state.sources = [data.source]
        if self._is_newcomer and participant.state.resumed is not None:
            require_origin(*participant.state.resumed, participant.state.origin, participant.state.progress.position)
        epoch, number = trainer.current_epoch, 0
        snapshot = self.trainer_state.snapshot
        if self._is_newcomer and participant.is_catching_up and snapshot.at_batch and snapshot.epoch == epoch:
            begin_epoch_as_others(trainer)
            number = snapshot.number
        self._is_newcomer = False
        participant.begin_epoch(epoch, data.order_of)
        self._epoch_begins = participant.position.streams[epoch], participant.position.draws[epoch]
        return number

    def asks_for(self, batch: GlobalBatch) -> bool:
        self.window.close()
        return (
            bool(self.participant.open_batches) and self._begins_step
        )  # Lightning clears gradients of which no step was made

    def stands_before(self, batch: GlobalBatch) -> None:
        self._logged.merge_pending()
        # A step of one worker is not torn: its state is sent from here alone.
        self.trainer_state.note(at_batch=True, epoch=batch.epoch, number=batch.number, moves=self.job.size > 1)

    def loading(self, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Random numbers are those of this batch and rank, if there are several ranks; also while the batch is moved to its device."""
        self.window.open(None if self.job.size == 1 else functools.partial(self.participant.seed, batch))
        return nullcontext()

    def opened(self, batch: GlobalBatch, part: MicroBatch, sample: Any) -> OpenBatch:
        self.decisions.participant = self.participant
        if not self.participant.open_batches:
            self._logged.begin_step()
            self._weighed.begin()
        self._given = GivenBatch(batch, part, index=self._trainer.fit_loop.epoch_loop.batch_idx + 1)
        return self._given

    # -- a step --

    def training_step(self, run: Callable[[], Any]) -> Any:
        given = self._given if self.is_making else None
        self.window.resume()
        if given:
            given.asked = self.participant.position.answers.asked
            given.noted = self.participant.state.attributes.note() if self.job.size > 1 else None
        if given and self._manual:
            return self._make_manually(self._manual, given, run)
        with self._collecting(given, given.part, given.part.weight) if given and self.job.size > 1 else nullcontext():
            result = run()
        self.window.close()
        if given:
            self._weighed.look(result.get("loss") if isinstance(result, dict) else result, len(given.part.indices))
            given.has_no_loss = result is None
        return result

    def _make_manually(self, manual: Manual, given: GivenBatch, run: Callable[[], Any]) -> Any:
        manual.begin_step()
        failure = None
        try:
            with self._collecting(given, given.part, given.part.weight) if self.job.size > 1 else nullcontext():
                if not self.participant.is_torn:  # by a question before it; then it is run for the new world
                    manual.run(run)
        except WorldBroken as error:
            failure = error
        self.window.close()
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
            self._weighed.look(loss, len(given.part.indices))
            # Each pass is summed by itself.
            make = functools.partial(self._backward, given, given.part.weight, loss, scaled, run, last=False)
            self._manual.sum(make, self.participant.common_seed)
            return
        if self.participant.is_reduced and self.job.size > 1:
            raise UserError(SECOND_PASS)
        self._weighed.require()
        is_last = not self._trainer.fit_loop._should_accumulate()
        self._backward(given, given.part.weight, loss, scaled, run, last=is_last)
        self._weighed.note()
        if is_last:
            self._reduce()

    def is_to_update(self) -> bool:
        """Whether the optimizer may step now that the closure was evaluated."""
        if not self.is_making:
            return False
        if self._manual is None and not self.participant.is_reduced:
            self._weighed.require()
        with torch.enable_grad():
            self._reduce()  # where no backward has done it, as the training step was skipped
        return not self.participant.is_catching_up

    @property
    def has_no_gradients(self) -> bool:
        """All batches of the step are left out."""
        return all(given.is_left_out for given in self._open_batches)

    def updated(self) -> None:
        if self.participant.state.progress.step > self._step_before:
            self.participant.close()

    def rides(self) -> Mapping[str, npt.ArrayLike]:
        if not self._tells or self._stopping is None:
            return {}
        return {"logged": self._logged.ride(self._open_batches), "stop": self._stopping.ride(self.job)}

    def heard(self, rides: Rides) -> bool:
        if not self._tells or self._stopping is None:
            return True
        wishes, late = rides["stop"]
        self._stopping.heard = None if late else bool(wishes)
        return self._logged.heard(rides["logged"], self._open_batches)

    @property
    def _tells(self) -> bool:
        return self.job.size > 1 or any(given.logged for given in self._open_batches)

    # -- a step that is torn --

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        for given in self._open_batches:
            given.logged.clear()
            given.has_no_loss = False
        if self._manual is not None:
            self._manual.begin_again()

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        assert isinstance(given, GivenBatch)
        trainer = self._trainer
        results = trainer.fit_loop.epoch_loop._results
        batch, size = results.batch, results.batch_size
        sample = trainer.precision_plugin.convert_input(sample)
        sample = trainer.lightning_module._on_before_batch_transfer(sample, dataloader_idx=0)
        sample = trainer.strategy.batch_to_device(sample, dataloader_idx=0)
        results.batch, results.batch_size = sample, None
        samples = round(weight * len(given.batch.indices))
        part = replace(given.part, indices=given.part.indices[: samples or None], weight=weight)
        again = functools.partial(trainer.strategy.step_again, sample, given.index)
        loss = None
        answers = self.participant.position.answers
        asked, answers.asked = answers.asked, given.asked  # which are the same once more
        try:
            with self._collecting(given, part, weight):
                if self._manual is not None:
                    self._manual.run(again)
                else:
                    loss = trainer.strategy.loss_of(again())
        finally:
            results.batch, results.batch_size = batch, size
            answers.asked = max(asked, answers.asked)
        if self._manual is None and loss is None:
            given.has_no_loss = True
        if loss is None or given.is_left_out:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = loss if scaler is None else scaler.scale(loss)
        self._backward(given, weight, loss, scaled, trainer.lightning_module.backward, last=False)

    # -- the end --

    def ended(self) -> None:
        """The loops are done."""
        if self._stopping is not None:
            self._stopping.end()
        if self._manual is not None:
            self._manual.close()
        if not self.participant.is_catching_up:
            self.trainer_state.note(at_batch=False)
            self.participant.state.last_step_made()

    def finish(self) -> LoopState | None:
        if self._open_batches and not self.participant.is_reduced:
            self.participant.close()
        return super().finish()

    def left(self) -> None:
        self.decisions.participant = None
        self._writing.stop()
        super().left()

    # -- details --

    def _batch_in_work(self) -> tuple[int, int] | None:
        """From its hooks to the end of them."""
        trainer = self._trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        is_in_work = trainer.training and batches.ready > batches.completed
        return (trainer.current_epoch, batches.ready) if is_in_work else None

    @property
    def _begins_step(self) -> bool:
        trainer = self._trainer
        return bool((trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0)

    def _collecting(self, given: GivenBatch, part: MicroBatch, weight: float) -> Any:
        return self._logged.collecting(given.logged, weight=weight, loaded=len(part.indices), samples=part.samples)

    def _backward(
        self,
        given: OpenBatch,
        weight: float,
        loss: torch.Tensor,
        scaled: torch.Tensor,
        run: Callable[..., Any],
        *,
        last: bool,
    ) -> None:
        def make(factor: float) -> None:
            run(scaled if factor == 1.0 else scaled * factor)

        self.participant.backward(given, weight, loss, make, last=last)

    def _reduce(self, failure: WorldBroken | None = None) -> None:
        self._step_before = self.participant.state.progress.step
        if self.participant.settle(failure) is Outcome.MADE:
            self._logged.apply()

    @property
    def _open_batches(self) -> list[GivenBatch]:
        return cast(list[GivenBatch], self.participant.open_batches)

    # -- worlds --

    def arrived(self, batch: GlobalBatch | None) -> None:
        if batch is None:
            return
        begun, draws = self._epoch_begins
        self.participant.position.streams.setdefault(batch.epoch, begun)
        self.participant.position.draws.setdefault(batch.epoch, draws)
        self.trainer_state.arrive()

    def rank_known(self) -> None:
        """Files are written by rank 0 alone."""
        if self._stopping is None:  # before it is known where the others have written
            return
        goes_on = self._is_newcomer or self.participant.state.resumed is not None
        self._writing.take_rank(self.job.rank, is_first=self.job.world.is_first, goes_on=goes_on)
