"""The training state: what survives a change of workers, and when it is safe.

Parameters change only after every gradient of the step has arrived from every worker. So a worker whose step failed
stands exactly before that step, and committing need not copy parameters or optimizer slots: only progress, the user's
own values, and what the forward pass itself changes (buffers, as the running statistics of batch norm).

Weights, step, position and learning rate move together in one place (`_after_step`): they are always from the same
moment.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import torch

from elasticdl.elastic.batch_plan import BatchPolicy
from elasticdl.elastic.errors import WorldChanged
from elasticdl.elastic.learning_rate import LearningRate, RateState
from elasticdl.elastic.progress import Progress
from elasticdl.elastic.session import Standing
from elasticdl.elastic.torch.collective import TorchCollective
from elasticdl.elastic.torch.learning_rate import OptimizerRate
from elasticdl.elastic.torch.loader import ElasticDataLoader
from elasticdl.elastic.torch.reducer import GradientReducer, Vote
from elasticdl.elastic.torch.sampler import ElasticSampler, StepBatch
from elasticdl.elastic.torch.transfer import broadcast_state
from elasticdl.elastic.world import World


@runtime_checkable
class Stateful(Protocol):
    """A scheduler of torch, a GradScaler, a metric: anything with the usual two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Engine(Protocol):
    """What a state asks of the job it belongs to."""

    @property
    def collective(self) -> TorchCollective: ...

    @property
    def policy(self) -> BatchPolicy: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def leaving(self) -> bool: ...

    def advance(self, *, waiting: bool) -> None: ...

    def step_done(self, progress: Progress, vote: Vote, learning_rate: float, *, ends_epoch: bool) -> None: ...


class TorchState:
    """Model, optimizer, position in the data, and any further values as attributes.

    Objects with ``state_dict`` and ``load_state_dict`` are sent and restored through these, other values are pickled.
    The optimizer needs no wrapper: its ``step()`` reduces the gradients of all workers first.
    """

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ElasticDataLoader | ElasticSampler | None,
        values: dict[str, Any],
        *,
        snapshot: bool,
    ) -> None:
        """``data`` tells where training stands in the data set. ``snapshot``: copy parameters and optimizer slots at each
        commit as well, for a loop that changes them otherwise than by ``optimizer.step()``."""
        self.model = model
        self.optimizer = optimizer
        self.loader = data if isinstance(data, ElasticDataLoader) else None
        self.sampler = data.sampler if isinstance(data, ElasticDataLoader) else data
        self.rate: OptimizerRate | None = None
        self.values = values
        self.progress = Progress()
        self.has_state = False
        self.vote: Vote | None = None
        self._engine = engine
        self._snapshot = snapshot
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._buffers = list(model.buffers())
        self._reducer = GradientReducer(parameters, self._buffers, engine.collective)
        if self.sampler is not None:
            self.sampler.attach(self._reducer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._reduced = False
        self._loss = float("nan")
        self._saved: dict[str, Any] = {"buffers": [buffer.clone() for buffer in self._buffers], "rate": RateState()}
        self._save()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"the state has no {name!r}; give it as TorchState({name}=...)") from None

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
    def learning_rate(self) -> float:
        """Of the optimizer's first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, rules: LearningRate) -> None:
        """Let the learning rate go by these rules: it is set before each ``optimizer.step()``.

        Raises:
            UserError: the rules do not fit the batch policy.
        """
        self.rate = OptimizerRate(self.optimizer, rules, fixed_batch=self._engine.policy.fixed)

    def standing(self, *, broken: bool, reason: str) -> Standing:
        return Standing(step=self.step, has_state=self.has_state, broken=broken, reason=reason)

    def commit(self) -> None:
        """Declare everything up to here safe; cheap. Call it after each step.

        Raises:
            WorldChanged: all members agreed in the last step to leave this world.
        """
        self._reduced = False
        if self.vote is not None and self._batch is not None:
            self._set_progress(self._batch.plan.after)  # also when a GradScaler has skipped the step
        self._save()
        if self.vote is not None and self.vote.leaving:
            self.vote = None
            raise WorldChanged("the members voted to leave this world")

    def reduce_gradients(self) -> None:
        """Sum the gradients of all workers now, for what needs them before ``optimizer.step()``: clipping, a GradScaler.

        Raises:
            WorldBroken: the step is torn; parameters are untouched.
        """
        batch = self._batch
        size = self._engine.collective.world.size
        self._engine.advance(waiting=True)
        self.vote = self._reducer.reduce(
            leaving=self._engine.leaving,
            share=batch.share if batch else 1 / size,
            scale=1.0 if batch else 1 / size,
        )
        self._engine.advance(waiting=False)
        self._reduced = True
        if batch and self.vote.samples != batch.plan.batch:
            raise RuntimeError(
                f"step {batch.plan.step} was made on {self.vote.samples} samples instead of {batch.plan.batch}: "
                "call batch.backward(loss) exactly once for each micro-batch"
            )

    def restore(self) -> None:
        """Back to the last commit: drops a torn step."""
        self._reduced = False
        with torch.no_grad():
            for buffer, saved in zip(self._buffers, self._saved["buffers"], strict=True):
                buffer.copy_(saved)
        self._load_values(copy.deepcopy(self._saved["values"]))
        if self._snapshot:
            self.model.load_state_dict(self._saved["model"])
            self.optimizer.load_state_dict(copy.deepcopy(self._saved["optimizer"]))
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
            received = broadcast_state(self.state_dict(), self._engine.collective, self._engine.device)
            root, mine = world.members[0], world.members[world.rank]
            if not mine.has_state or mine.step != root.step:
                self.load_state_dict(received)
        self.has_state = True
        self.vote = None
        self._save()
        self._save_place()

    def state_dict(self) -> dict[str, Any]:
        """Everything, tensors by reference; the content of a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "values": self._dump_values(),
            "progress": asdict(self.progress),
            "rate": asdict(self.rate.state) if self.rate else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_values(state["values"])
        self._set_progress(Progress(**state["progress"]))
        if self.rate is not None and state["rate"] is not None:
            self.rate.state = RateState(**state["rate"])

    # -- around optimizer.step() --

    @property
    def _batch(self) -> StepBatch | None:
        """What the present step is made on, if the data come from a sampler."""
        return self.sampler.current if self.sampler is not None else None

    def _before_step(self, *_: Any) -> None:
        if not self._reduced:
            self.reduce_gradients()
        if self.rate is not None:
            plan = self._batch.plan if self._batch else None
            step, epoch = (plan.step, plan.epoch) if plan else (self.step + 1, self.progress.epoch)
            self.rate.set(step, epoch, self._engine.collective.world)

    def _after_step(self, *_: Any) -> None:
        assert self.vote is not None
        self._reduced = False
        batch = self._batch
        self._set_progress(batch.plan.after if batch else self.progress.after(self.vote.samples))
        self._loss = self.vote.loss
        if self.rate is not None:
            self.rate.made()
        if not self._snapshot:  # else parameters, too, go back to the last commit
            self._save_place()
        ends_epoch = self.sampler is not None and self.progress.position >= self.sampler.order.samples
        self._engine.step_done(self.progress, self.vote, self.learning_rate, ends_epoch=ends_epoch)

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
        if self._snapshot:
            self._save_place()
            self._saved["model"] = copy.deepcopy(self.model.state_dict())
            self._saved["optimizer"] = copy.deepcopy(self.optimizer.state_dict())

    def _save_place(self) -> None:
        """What moves with the parameters, at each step."""
        self._saved["progress"] = self.progress
        if self.rate is not None:
            self._saved["rate"] = self.rate.state
        with torch.no_grad():
            for saved, buffer in zip(self._saved["buffers"], self._buffers, strict=True):
                saved.copy_(buffer)

    def _dump_values(self) -> dict[str, Any]:
        return {name: v.state_dict() if isinstance(v, Stateful) else v for name, v in self.values.items()}

    def _load_values(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            present = self.values.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(value)
            else:
                self.values[name] = value
