"""The training state: model, optimizer, the user's values. The part that all frameworks share.

Where training stands, and what of it is safe when, is the business of the worker's core
(`elasticdl.elastic.core.position`). Here is what is saved then and gone back to: the user's values, the optimizer's
settings (rate, momentum and whatever else a scheduler writes), and what moves with the parameters.
"""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import memory_of_the_worker
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.agreement import BatchFacts, Disagreement
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.learning_rate import LearningRate, RateControl, RateState
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.training.context import JobContext
from elasticdl.elastic.training.data_facts import DataFacts, require_same
from elasticdl.elastic.training.sampler import DataCursor
from elasticdl.elastic.training.state_check import Pieces, StateCheck

UNCHANGING = (type(None), bool, int, float, complex, str, bytes)

# Copies a tensor of the framework's, into an earlier copy where that fits; None if it is no such tensor.
CopyTensor = Callable[[Any, Any], Any]


def copied(value: Any, before: Any, copy_tensor: CopyTensor) -> Any:
    """A copy of a nested value, in the memory of ``before``, an earlier copy of it, where that has the same shape.

    Two places of one object are two places of one copy.
    """
    return _Copier(copy_tensor).copy(value, before)


class _Copier:
    def __init__(self, copy_tensor: CopyTensor) -> None:
        self._copy_tensor = copy_tensor
        self._memo: dict[int, Any] = {}  # as of `copy.deepcopy`
        self._used: set[int] = set()  # ids of the memory that holds a part of the new copy

    def copy(self, value: Any, before: Any) -> Any:
        kind = type(value)
        if kind in UNCHANGING:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind is dict or kind is OrderedDict:
            return self._copy_dict(value, before)
        if kind is list or kind is tuple:
            return self._copy_sequence(value, before)
        made = self._copy_leaf(value, None if id(before) in self._used else before)
        self._used.add(id(made))
        self._memo[id(value)] = made
        return made

    def _copy_dict(self, value: dict[Any, Any], before: Any) -> Any:
        old = before if type(before) is type(value) else {}
        made = self._memo[id(value)] = type(value)()
        for key, item in value.items():
            made[key] = self.copy(item, old.get(key))
        if isinstance(value, OrderedDict):  # a module's of torch, which notes the versions of its parts there
            vars(made).update(copy.deepcopy(vars(value), self._memo))
        return made

    def _copy_sequence(self, value: Any, before: Any) -> Any:
        old = before if type(before) is type(value) and len(before) == len(value) else [None] * len(value)
        items: list[Any] = []
        if type(value) is list:
            self._memo[id(value)] = items
        items += [self.copy(item, each) for item, each in zip(value, old, strict=True)]
        return items if type(value) is list else self._memo.setdefault(id(value), tuple(items))

    def _copy_leaf(self, value: Any, before: Any) -> Any:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            fits = type(before) is np.ndarray and (before.shape, before.dtype) == (value.shape, value.dtype)
            made = before if fits else np.empty_like(value)
            np.copyto(made, value)
            return made
        made = self._copy_tensor(value, before)
        return copy.deepcopy(value, self._memo) if made is None else made


@runtime_checkable
class Stateful(Protocol):
    """A scheduler of torch, a GradScaler, a metric: anything with the usual two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def _is_stateful(value: Any) -> bool:
    """As isinstance() says after a hundred times the time, which each commit would pay."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class TrainingState(ABC):
    """Model, optimizer, position in the data, and any further values as attributes.

    Objects with ``state_dict`` and ``load_state_dict`` are sent and restored through these, other values are pickled.
    """

    _remedy: ClassVar[str]  # for a step on too few samples
    _dump_to: ClassVar[staticmethod[..., object]]  # of a state, into a file
    _load_from: ClassVar[staticmethod[..., Any]]  # of a file

    def __init__(
        self,
        job: JobContext[Any],
        sampler: DataCursor | None,
        values: dict[str, Any],
        *,
        start: Progress | None = None,
        has_state: bool = False,
        snapshot: bool = False,
    ) -> None:
        """``start``: where training stands, if not at its beginning. ``snapshot``: each commit copies the parameters, too."""
        self.sampler = sampler
        self.rate: RateControl | None = None
        self.values = values
        self.sources = list(sampler.sources) if sampler is not None else []  # the data, as others must have them
        self.stopping = False  # this member's vote for ending the training; only rank 0's is looked at
        self._position = Position(start, has_state=has_state)
        self._job = job
        self._snapshot = snapshot
        self._loss = float("nan")
        self._saved: dict[str, Any] = {"rate": RateState(), "values": {}}
        if sampler is not None:
            sampler.settings_changed = lambda: self._dump_settings() != self._saved["settings"]
            sampler.step_begins = lambda: self._check.begin(self.progress)
        worker_id, take_over = job.session.core.worker_id, lambda: self._load_own(self._broadcast())
        self._check = StateCheck(job.check_state, worker_id, job.collective, self._pieces, take_over, job.warn)
        self.take_part()

    def take_part(self) -> None:
        """Be the state that the worker's core speaks of; there is one at a time."""
        order = self.sampler.order if self.sampler is not None else None
        made = p.StateMade(self.progress, self.has_state, order, self._snapshot)
        self._position = self._job.adopt(self, self._position, made)

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
    def progress(self) -> Progress:
        return self._position.progress

    @property
    def has_state(self) -> bool:
        return self._position.has_state

    @property
    def vote(self) -> Vote | None:
        """Of all members, in the last step."""
        return self._position.vote

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
            UserError: the rules do not fit the batch policy, or the optimizer.
        """
        self.rate = RateControl(rules, self._own_rate(), fixed_batch=self._job.policy.fixed)

    def commit(self) -> None:
        """Declare everything up to here safe; cheap. Make it the last thing of each step.

        At the end of an epoch, after its last batch, it ends the epoch: what comes before it is not done again.

        Raises:
            WorldChanged: all members agreed in the last step to leave this world.
        """
        self._job.post(p.On.COMMIT)

    def save(self, part: p.Part) -> None:
        if part is p.Part.AT_COMMIT:
            self._saved["values"] = copied(self._dump_values(), self._saved["values"], self._copy_tensor)
            self._saved["settings"] = self._dump_settings()
        elif self.rate is not None:
            self._saved["rate"] = self.rate.state

    def restore(self) -> None:
        """Go back to what was saved."""
        self._restore_own()
        self._load_values(copy.deepcopy(self._saved["values"]))
        self._load_settings(copy.deepcopy(self._saved["settings"]))
        if self.sampler is not None:
            self.sampler.drop()
        if self.rate is not None:
            self.rate.state = self._saved["rate"]

    def keep_settings(self) -> None:
        """What has been set of the optimizer since the last commit stays if a step is torn: it won't be set again."""
        self._saved["settings"] = self._dump_settings()

    def sync(self, world: World) -> None:
        """Bring every member to rank 0's state; sends nothing when all stand after the same step.

        Raises:
            UserError: this worker has other data than rank 0.
            WorldBroken: this worker's own state is untouched.
        """
        if world.needs_sync and world.size > 1:
            require_same(self._data_facts(), self._job.collective)
            received = self._broadcast()
            if not world.stands_with_root(world.rank):
                with memory_of_the_worker("the training state"):
                    self.load_state_dict(received)

    def state_dict(self) -> dict[str, Any]:
        """Everything; the content of a checkpoint."""
        return {**self._dump_own(), **self._dump_rest()}

    def sent(self) -> dict[str, Any]:
        """All that another worker of the job is given, as it is between two steps."""
        return self.state_dict()

    def _data_facts(self) -> DataFacts:
        policy, order = self._job.policy, self.sampler.order if self.sampler is not None else None
        settings = {"global batch size": policy.global_batch, "batch size per worker": policy.worker_batch}
        if order is not None:
            settings |= {"seed": order.seed, "shuffle": order.shuffle, "drop_last": order.drop_last}
            settings |= {"steps_per_epoch": order.steps_per_epoch, "first epoch": order.first_epoch}
        return DataFacts(self._job.session.core.worker_id, settings, tuple(self.sources))

    def _dump_rest(self) -> dict[str, Any]:
        return {
            "values": self._dump_values(),
            "progress": asdict(self.progress),
            "rate": asdict(self.rate.state) if self.rate else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_own(state)
        self._load_values(state["values"])
        if self.rate is not None and state["rate"] is not None:
            self.rate.state = RateState(**state["rate"])
        self._job.post(p.Loaded(Progress(**state["progress"])))

    def write(self, file: IO[bytes]) -> None:
        """All of the state, for a worker of the same job."""
        self._dump_to(self.sent(), file)

    def read(self, file: IO[bytes]) -> None:
        """Load what another worker has written, into the job's own folder."""
        self.load_state_dict(self._load_from(file))

    def oversights(self) -> list[str]:
        """What looks forgotten in a training that has ended, a line each."""
        planned = self.sampler.planned_epochs if self.sampler is not None else 0
        return self._position.oversights(planned, self._job.world.size)

    # -- what differs between frameworks --

    @abstractmethod
    def _own_rate(self) -> float:
        """The optimizer's rate as the user has given it, before rules apply."""

    @abstractmethod
    def _set_rate(self, rate: float) -> None: ...

    @abstractmethod
    def _dump_own(self) -> dict[str, Any]:
        """``model`` and ``optimizer``."""

    @abstractmethod
    def _load_own(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def cast_end_vote(self) -> Vote:
        """The collectives of a step, without gradients: this worker's training function has returned."""

    @abstractmethod
    def _pieces(self) -> Pieces:
        """Of model and optimizer, by name, all that is the same on all members between two steps."""

    @abstractmethod
    def _dump_settings(self) -> Any:
        """Copies of what an optimizer is told, and does not work out itself: its rate, momentum, weight decay."""

    @abstractmethod
    def _load_settings(self, settings: Any) -> None: ...

    @abstractmethod
    def _restore_own(self) -> None:
        """Undo what a torn step has done to the model."""

    @abstractmethod
    def _copy_tensor(self, value: Any, before: Any) -> Any:
        """See `elasticdl.elastic.training.state.CopyTensor`."""

    @abstractmethod
    def _broadcast(self) -> dict[str, Any]:
        """Rank 0's state, as of `sent`."""

    # -- a step --

    @property
    def _wants_to_stop(self) -> bool:
        return self.stopping and self._job.world.rank == 0

    def _voted(self, vote: Vote, device_seconds: float = 0.0) -> None:
        """The gradients of all members have arrived; see `p.Voted`.

        Raises:
            RuntimeError: the members do not make the same step.
            UserError: the batch of this worker, or that of others, is not the same as that of rank 0.
            WorldBroken: a worker that came later is refused.
        """
        self._check.voted(one_state=vote.one_state or bool(vote.ended))
        difference = "" if vote.one_batch or vote.ended else self._tell_batches()
        self._job.post(p.Voted(vote, self._remedy, device_seconds, difference))

    def _tell_batches(self) -> str:
        """What differs between the batches of the members, who all ask for it now."""
        plan, core = self._position.batch, self._job.session.core
        epoch, step, samples = (plan.epoch, plan.step, plan.whole) if plan else (self.progress.epoch, self.step + 1, ())
        mine = BatchFacts.of(core.worker_id, epoch, step, samples, trained=self._position.made > 0)
        told = self._job.collective.gather(np.frombuffer(bytearray(mine.to_bytes()), np.uint8), "elasticdl.batches")
        judged = Disagreement.of([BatchFacts.from_bytes(each.tobytes()) for each in told]) if told else Disagreement()
        said = self._job.collective.broadcast_bytes(pickle.dumps(judged), "elasticdl.difference")
        found: Disagreement = pickle.loads(said)  # of another member of the same job
        if core.worker_id in found.refused:
            raise UserError(f"refused: {found.line}")
        if found.refused:
            raise WorldBroken(f"workers {list(found.refused)} are refused: {found.line}")
        return found.line

    def _before_update(self) -> None:
        """The parameters change next."""
        if self.rate is not None:
            plan = self._position.batch
            step, epoch = (plan.step, plan.epoch) if plan else (self.step + 1, self.progress.epoch)
            self._set_rate(self.rate.at(step, epoch, self._job.world))

    def _step_made(self) -> None:
        """The parameters have changed."""
        assert self.vote is not None, "a step is made after its vote"
        self._loss = self.vote.loss
        if self.rate is not None:
            self.rate.made()
        self._job.post(p.StepMade(self.learning_rate))
        self._check.step_made(self.step)

    # -- saving --

    def _dump_values(self) -> dict[str, Any]:
        return {name: v.state_dict() if _is_stateful(v) else v for name, v in self.values.items()}

    def _load_values(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            present = self.values.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(value)
            else:
                self.values[name] = value
