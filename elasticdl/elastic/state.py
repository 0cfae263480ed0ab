"""The training state: what survives a change of workers, and when it is safe. The part that all frameworks share.

Parameters change only after every gradient of the step has arrived from every worker. So a worker whose step failed
stands exactly before that step, and committing need not copy parameters or optimizer slots.

Weights, step, position and learning rate move together in one place (`TrainingState._step_made`): they are always from
the same moment.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from elasticdl.elastic.batch_plan import BatchPolicy
from elasticdl.elastic.errors import WorldChanged
from elasticdl.elastic.learning_rate import LearningRate, RateControl, RateState
from elasticdl.elastic.progress import Progress
from elasticdl.elastic.sampler import EpochPosition, StepBatch
from elasticdl.elastic.session import Standing
from elasticdl.elastic.vote import Vote
from elasticdl.elastic.world import World


@runtime_checkable
class Stateful(Protocol):
    """A scheduler of torch, a GradScaler, a metric: anything with the usual two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Engine(Protocol):
    """What a state asks of the job it belongs to."""

    @property
    def world(self) -> World: ...

    @property
    def policy(self) -> BatchPolicy: ...

    @property
    def leaving(self) -> bool: ...

    def advance(self, *, waiting: bool) -> None: ...

    def step_done(self, progress: Progress, vote: Vote, learning_rate: float, *, ends_epoch: bool) -> None: ...


class TrainingState(ABC):
    """Model, optimizer, position in the data, and any further values as attributes.

    Objects with ``state_dict`` and ``load_state_dict`` are sent and restored through these, other values are pickled.
    """

    def __init__(self, engine: Engine, sampler: EpochPosition | None, values: dict[str, Any]) -> None:
        self.sampler = sampler
        self.rate: RateControl | None = None
        self.values = values
        self.progress = Progress()
        self.has_state = False
        self.vote: Vote | None = None
        self.stopping = False  # this member's vote for ending the training; only rank 0's is looked at
        self._engine = engine
        self._loss = float("nan")
        self._saved: dict[str, Any] = {"rate": RateState()}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            title = type(self).__name__
            raise AttributeError(f"the state has no {name!r}; give it as {title}({name}=...)") from None

    def __setattr__(self, name: str, value: Any) -> None:
        values = self.__dict__.get("values")
        if values is not None and name in values:
            values[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def step(self) -> int:
        """Optimizer steps made on the model, over all workers and worlds."""
        return self.progress.step

    @property
    def loss(self) -> float:
        """Mean over the global batch of the last step; NaN before the first."""
        return self._loss

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The optimizer's present one."""

    def follow(self, rules: LearningRate) -> None:
        """Let the learning rate go by these rules: it is set before each update of the parameters.

        Raises:
            UserError: the rules do not fit the batch policy.
        """
        self.rate = self._make_rate(rules)

    def standing(self, *, broken: bool, reason: str) -> Standing:
        return Standing(step=self.step, has_state=self.has_state, broken=broken, reason=reason)

    def commit(self) -> None:
        """Declare everything up to here safe; cheap. Call it after each step.

        Raises:
            WorldChanged: all members agreed in the last step to leave this world.
        """
        if self.vote is not None and self._batch is not None:
            self._set_progress(self._batch.plan.after)  # also when the update itself was skipped (a GradScaler)
        self._save()
        if self.vote is not None and self.vote.leaving:
            self.vote = None
            raise WorldChanged("the members voted to leave this world")

    def restore(self) -> None:
        """Back to the last commit: drops a torn step."""
        self._restore_own()
        self._load_values(copy.deepcopy(self._saved["values"]))
        self._set_progress(self._saved["progress"])
        if self.rate is not None:
            self.rate.state = self._saved["rate"]
        self.vote = None

    def sync(self, world: World) -> None:
        """Bring every member to rank 0's state; sends nothing when all stand after the same step.

        Raises:
            WorldBroken: this worker's own state is untouched.
        """
        if world.needs_sync and world.size > 1:
            received = self._broadcast()
            root, mine = world.members[0], world.members[world.rank]
            if not mine.has_state or mine.step != root.step:
                self.load_state_dict(received)
        self.has_state = True
        self.vote = None
        self._save()
        self._save_place()

    def state_dict(self) -> dict[str, Any]:
        """Everything; the content of a checkpoint."""
        return {**self._dump_own(), **self._dump_rest()}

    def _dump_rest(self) -> dict[str, Any]:
        return {
            "values": self._dump_values(),
            "progress": asdict(self.progress),
            "rate": asdict(self.rate.state) if self.rate else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_own(state)
        self._load_values(state["values"])
        self._set_progress(Progress(**state["progress"]))
        if self.rate is not None and state["rate"] is not None:
            self.rate.state = RateState(**state["rate"])

    # -- what differs between frameworks --

    @abstractmethod
    def _make_rate(self, rules: LearningRate) -> RateControl: ...

    @abstractmethod
    def _set_rate(self, step: int, epoch: int) -> None:
        """Set the optimizer's rate for the step with this number by the rules (there are some)."""

    @abstractmethod
    def _dump_own(self) -> dict[str, Any]:
        """``model`` and ``optimizer``."""

    @abstractmethod
    def _load_own(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def _restore_own(self) -> None:
        """Undo what a torn step has done to the model."""

    @abstractmethod
    def _broadcast(self) -> dict[str, Any]:
        """Rank 0's state, as of `state_dict`."""

    # -- a step --

    @property
    def _batch(self) -> StepBatch | None:
        """What the present step is made on, if the data come from a sampler."""
        return self.sampler.current if self.sampler is not None else None

    def _check_samples(self, vote: Vote, remedy: str) -> None:
        batch = self._batch
        if batch and vote.samples != batch.plan.batch:
            raise RuntimeError(
                f"step {batch.plan.step} was made on {vote.samples} samples instead of {batch.plan.batch}: {remedy}"
            )

    def _before_update(self) -> None:
        """The gradients have arrived from all workers; the parameters change next."""
        if self.rate is not None:
            plan = self._batch.plan if self._batch else None
            self._set_rate(*((plan.step, plan.epoch) if plan else (self.step + 1, self.progress.epoch)))

    def _step_made(self) -> None:
        """The parameters have changed."""
        assert self.vote is not None
        batch = self._batch
        self._set_progress(batch.plan.after if batch else self.progress.after(self.vote.samples))
        self._loss = self.vote.loss
        if self.rate is not None:
            self.rate.made()
        self._after_update()
        ends_epoch = self.sampler is not None and self.sampler.at_end
        self._engine.step_done(self.progress, self.vote, self.learning_rate, ends_epoch=ends_epoch)

    def _after_update(self) -> None:
        self._save_place()

    # -- saving --

    def _set_progress(self, progress: Progress) -> None:
        self.progress = progress
        if self.sampler is not None:
            self.sampler.progress = progress

    def _save(self) -> None:
        self._saved["values"] = copy.deepcopy(self._dump_values())
        if self.sampler is not None:
            self.progress = self.sampler.progress
        self._saved["progress"] = self.progress

    def _save_place(self) -> None:
        """What moves with the parameters, at each step."""
        self._saved["progress"] = self.progress
        if self.rate is not None:
            self._saved["rate"] = self.rate.state

    def _dump_values(self) -> dict[str, Any]:
        return {name: v.state_dict() if isinstance(v, Stateful) else v for name, v in self.values.items()}

    def _load_values(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            present = self.values.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(value)
            else:
                self.values[name] = value
