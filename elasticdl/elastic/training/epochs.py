"""Training epoch by epoch, with callbacks: what a model-zoo module's training and Keras's ``fit`` have in common.

`EpochDriver.train` is entered anew in each world. What it does at a step follows from the state alone (position and
ledger), which all members share; so it takes up wherever the last world ended, and does nothing twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from elasticdl.elastic.training.cursor import ElasticLoader, Ordered
from elasticdl.elastic.training.job import Hooks, JobContext
from elasticdl.elastic.training.state import TrainingState


@dataclass
class EpochLedger:
    """The present epoch so far, over all workers: a part of the training state, committed with steps only."""

    loss_sum: float = 0.0  # over samples
    loss_samples: int = 0
    epoch_steps: int = 0

    def begin_epoch(self) -> None:
        self.loss_sum, self.loss_samples, self.epoch_steps = 0.0, 0, 0

    def add_loss(self, loss: float, samples: int) -> None:
        """``loss``: the mean over so many samples, the global batch of a step."""
        self.loss_sum += loss * samples
        self.loss_samples += samples
        self.epoch_steps += 1

    @property
    def epoch_loss(self) -> float:
        return self.loss_sum / self.loss_samples if self.loss_samples else float("nan")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


LedgerT = TypeVar("LedgerT", bound=EpochLedger)


class EpochDriver(Hooks, ABC, Generic[LedgerT]):
    """Makes the steps of all epochs; what comes before and after them is a subclass's."""

    def __init__(
        self,
        context: JobContext,
        loader: ElasticLoader[Any],
        state: TrainingState,
        ledger: LedgerT,
        *,
        epochs: int,
        max_step: int = 0,
    ) -> None:
        """``ledger``: among the state's values. ``max_step``: after which training ends; 0 for none."""
        self._context = context
        self._loader = loader
        self._sampler: Ordered = loader.sampler
        self.state = state
        self._ledger = ledger
        self._epochs = epochs
        self._max_step = max_step
        self._stopping = False  # the callbacks want training to end: agreed by all members

    def train(self) -> None:
        """Train in the present world, to the end if it lasts.

        Raises:
            WorldChanged: the members leave this world together.
            WorldBroken: the world broke.
        """
        for epoch in self._loader.epochs(self._epochs):
            if self._sampler.progress.position == 0:  # the state follows at its next commit
                self._ledger.begin_epoch()
            self._begin_epoch(epoch)
            if not self._reached_end:
                self._make_steps()
            self._end_epoch(epoch)
            if self._reached_end:
                break
        self._complete()

    def _make_steps(self) -> None:
        for batch in self._loader:
            loss = self._make_step(batch)
            assert self.state.vote is not None  # cast in that step
            self._stopping = self.state.vote.stopping
            self._ledger.add_loss(loss, batch.plan.batch)
            self._after_step(loss)
            self._stopping = self._stops_after_step() or self._stopping
            self.state.commit()
            self._after_commit()
            if self._reached_end:
                break

    @property
    def _reached_end(self) -> bool:
        return self._stopping or 0 < self._max_step <= self.state.step

    def _total_steps(self, workers: int) -> int:
        """Of the whole training; with a fixed batch per worker, if the number of workers stays as it is."""
        total = self._sampler.order.total_steps(self.state.progress, self._epochs, workers)
        return min(total, self._max_step) if self._max_step else total

    def _tell_totals(self) -> None:
        self._context.plan_total(self._total_steps(self._context.size), self._epochs)

    @abstractmethod
    def _begin_epoch(self, epoch: int) -> None:
        """Also where the training is taken up within an epoch."""

    @abstractmethod
    def _make_step(self, batch: Any) -> float:
        """Forward, backward, reduction and update; the mean loss over the global batch."""

    @abstractmethod
    def _after_step(self, loss: float) -> None:
        """The step is in the ledger, but not committed yet."""

    def _stops_after_step(self) -> bool:
        """Whether a callback has wished so now, agreed by all members; a wish of before the step has come with its votes."""
        return False

    def _after_commit(self) -> None:
        """Nothing to do, unless a subclass has something."""

    @abstractmethod
    def _end_epoch(self, epoch: int) -> None: ...

    @abstractmethod
    def _complete(self) -> None:
        """All steps are made. Members that are done here wait for the others: by a vote, once it has returned."""
