"""The training state: what survives a change of workers, and when it is safe. The part that all frameworks share.

Parameters change only after every gradient of the step has arrived from every worker. So a worker whose step failed
stands exactly before that step, and committing need not copy parameters or optimizer slots.

A commit saves everything else: position, the user's values, and the optimizer's settings (rate, momentum and whatever
else a scheduler writes). A torn step goes back to that. If a step was made since the last commit, weights can't go back, and
so nothing does: all parts of a state are of one moment.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import IO, Any, NoReturn, Protocol, runtime_checkable

from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.core.errors import WorldChanged
from elasticdl.elastic.core.learning_rate import LearningRate, RateControl, RateState
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.session.membership import JoinRequest
from elasticdl.elastic.training.sampler import DataCursor, StepBatch


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

    def warn(self, message: str) -> None: ...


class TrainingState(ABC):
    """Model, optimizer, position in the data, and any further values as attributes.

    Objects with ``state_dict`` and ``load_state_dict`` are sent and restored through these, other values are pickled.
    """

    def __init__(self, engine: Engine, sampler: DataCursor | None, values: dict[str, Any]) -> None:
        self.sampler = sampler
        self.rate: RateControl | None = None
        self.values = values
        self.progress = Progress()
        self.has_state = False
        self.vote: Vote | None = None
        self.stopping = False  # this member's vote for ending the training; only rank 0's is looked at
        self._engine = engine
        self._loss = float("nan")
        self._ahead = False  # a step was made since everything was saved
        self._committed = False  # it was saved by a commit, in this world
        self._warned_of_order = False
        self.made = self.commits = 0  # steps and commits, by this process
        self._saved: dict[str, Any] = {"rate": RateState()}
        if sampler is not None:
            sampler.on_step = self.begin_step

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

    def standing(self, *, broken: bool, reason: str) -> JoinRequest:
        return JoinRequest(self.step, self.has_state, broken=broken, reason=reason, epoch=self.progress.epoch)

    def commit(self) -> None:
        """Declare everything up to here safe; cheap. Make it the last thing of each step.

        At the end of an epoch, after its last batch, it ends the epoch: what comes before it is not done again.

        Raises:
            WorldChanged: all members agreed in the last step to leave this world.
        """
        sampler, batch = self.sampler, self._batch
        if batch is not None and self.vote is not None:
            self._set_progress(batch.plan.after)  # also when the update itself was skipped (a GradScaler)
        elif sampler is not None and batch is None and sampler.at_end:
            sampler.progress = sampler.progress.next_epoch()
        self._save()
        self._committed = True
        self.commits += 1
        if self.vote is not None and self.vote.leaving:
            self.vote = None
            raise WorldChanged("the members voted to leave this world")

    def begin_step(self) -> None:
        """The loader calls this before it gives a batch: from here on, a step may be torn.

        What no commit has saved and can't be done again is saved now: a step that was not committed, and a learning rate
        that was set after the commit.
        """
        settings_differ = self._dump_settings() != self._saved["settings"]
        within_epoch = self.sampler is None or self.sampler.progress == self._saved["progress"]
        if self._ahead or (settings_differ and within_epoch and self._committed):
            if not self._ahead and self.progress.position:
                self._warn_of_order()
            self._save()
        self._committed = False

    def restore(self) -> None:
        """Drop a torn step: back to the last commit, or to where the torn step began if others came in between."""
        if self._ahead:
            self._save()
        self._restore_own()
        self._load_values(copy.deepcopy(self._saved["values"]))
        self._load_settings(copy.deepcopy(self._saved["settings"]))
        self._set_progress(self._saved["progress"])
        if self.sampler is not None:
            self.sampler.end()
        if self.rate is not None:
            self.rate.state = self._saved["rate"]
        self.vote = None
        self._committed = False

    def keep_settings(self) -> None:
        """What has been set of the optimizer since the last commit stays if a step is torn: it won't be set again."""
        self._saved["settings"] = self._dump_settings()

    def sync(self, world: World) -> None:
        """Bring every member to rank 0's state; sends nothing when all stand after the same step.

        Raises:
            WorldBroken: this worker's own state is untouched.
        """
        if world.needs_sync and world.size > 1:
            received = self._broadcast()
            if not world.stands_with_root(world.rank):
                self.load_state_dict(received)
        self.has_state = True
        self.vote = None
        self._committed = False
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

    def end(self) -> None:
        """The training function has returned; wait for those of the other members, which have made the same steps.

        If one of them is lost before, the others are still there to do what it has not done.

        Raises:
            RuntimeError: somebody is still to make a step.
            WorldBroken: a member was lost.
        """
        if self._engine.world.size == 1:
            return
        self._engine.advance(waiting=True)
        ended = self._reduce_nothing().ended
        self._engine.advance(waiting=False)
        if ended < self._engine.world.size:
            self._refuse_uneven_end(ended)

    def oversights(self) -> list[str]:
        """What looks forgotten in a training that has ended, a line each."""
        found = []
        if self.step == 0:
            found.append(
                "training has ended without a step: no optimizer.step() of the optimizer that the state was given"
            )
        elif self.made and not self.commits:
            found.append(
                f"{self.made} steps were made without a state.commit(): no worker could join or leave meanwhile; call it "
                "after each step"
            )
        sampler = self.sampler
        if self.step and sampler and sampler.progress.epoch + sampler.at_end < sampler.planned_epochs:
            found.append(
                f"training has ended in epoch {sampler.progress.epoch + 1} of the {sampler.planned_epochs} that its loop "
                f"plans, after step {self.step}"
            )
        return found

    # -- what differs between frameworks --

    @abstractmethod
    def write(self, file: IO[bytes]) -> None:
        """All of the state, for a worker of the same job."""

    @abstractmethod
    def read(self, file: IO[bytes]) -> None:
        """Load what `write` has written."""

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
    def _reduce_nothing(self) -> Vote:
        """The collectives of a step, without gradients: this worker's training function has returned."""

    @abstractmethod
    def _dump_settings(self) -> Any:
        """Copies of what an optimizer is told, and does not work out itself: its rate, momentum, weight decay."""

    @abstractmethod
    def _load_settings(self, settings: Any) -> None: ...

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

    def _check_vote(self, vote: Vote, remedy: str) -> None:
        batch = self._batch
        if vote.ended:
            self._refuse_uneven_end(vote.ended)
        if batch and vote.samples != batch.plan.batch:
            raise RuntimeError(
                f"step {batch.plan.step} was made on {vote.samples} samples instead of {batch.plan.batch}: {remedy}"
            )

    def _refuse_uneven_end(self, ended: int) -> NoReturn:
        raise RuntimeError(
            f"{ended} of {self._engine.world.size} workers ended their training after step {self.step} and the others go on: "
            "the training function must return after the same step on all workers"
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
        self.made += 1
        if self.rate is not None:
            self.rate.made()
        self._after_update()
        ends_epoch = self.sampler is not None and self.sampler.at_end
        self._engine.step_done(self.progress, self.vote, self.learning_rate, ends_epoch=ends_epoch)

    def _after_update(self) -> None:
        self._ahead = True
        self._save_place()

    def _warn_of_order(self) -> None:
        if not self._warned_of_order:
            self._warned_of_order = True
            self._engine.warn(
                "the optimizer's learning rate (or momentum, ...) is changed after state.commit(): a change of workers there "
                "loses it; call scheduler.step() before state.commit()"
            )

    # -- saving --

    def _set_progress(self, progress: Progress) -> None:
        self.progress = progress
        if self.sampler is not None:
            self.sampler.progress = progress

    def _save(self) -> None:
        self._ahead = False
        self._saved["values"] = copy.deepcopy(self._dump_values())
        self._saved["settings"] = self._dump_settings()
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
