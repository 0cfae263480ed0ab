"""The training state: model, optimizer, the user's values. The part that all frameworks share.

Where training stands, and what of it is safe when, is the business of the worker's core
(`elasticdl.elastic.core.position`). Here is what is saved then and gone back to: the user's values, the optimizer's
settings (rate, momentum and whatever else a scheduler writes), and what moves with the parameters.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any, ClassVar

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import memory_of_the_worker
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.learning_rate import LearningRate, RateControl, RateState
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.training.batch_check import BatchCheck
from elasticdl.elastic.training.copies import copied
from elasticdl.elastic.training.cursor import Ordered
from elasticdl.elastic.training.data_facts import DataFacts, require_same
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.kept_state import difference
from elasticdl.elastic.training.pieces import Array, Marks, others_of
from elasticdl.elastic.training.state_check import StateCheck
from elasticdl.elastic.training.stateful import Stateful, is_stateful

BESIDE = "beside"


class TrainingState(ABC):
    """Model, optimizer, position in the data, and any further values as attributes.

    Objects with ``state_dict`` and ``load_state_dict`` are sent and restored through these, other values are pickled.
    """

    _remedy: ClassVar[str]  # for a step on too few samples
    _dump_to: ClassVar[staticmethod[..., object]]  # of a state, into a file
    _load_from: ClassVar[staticmethod[..., Any]]  # of a file
    _ends_with_function: ClassVar[bool] = True  # training is over when the script's function returns

    def __init__(
        self,
        job: JobContext[Any],
        sampler: Ordered | None,
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
        self.begins_as_told = False  # the script says from which checkpoint of its own it goes on, and means that one
        self.resumed: tuple[str, Mapping[str, Any]] | None = None  # a kept state that was loaded, and its origin
        self.cannot_be_kept = ""  # why no other job could go on from it, if so
        # Takes what else a file holds, and puts it.
        self.beside: tuple[Callable[[], Any], Callable[[Any], None]] | None = None
        self._position = Position(start, has_state=has_state)
        self._job = job
        self._snapshot = snapshot
        self._loss = float("nan")
        self._saved: dict[str, Any] = {"rate": RateState(), "values": {}}
        if sampler is not None:
            sampler.settings_changed = lambda: self._dump_settings() != self._saved["settings"]
            sampler.step_begins = lambda: self._check.begin(self.progress)
        self._batch_check = BatchCheck(job.collective, self._data_facts)
        self._check = StateCheck(job.check_state, job.worker_id, job.collective, self, job.warn)
        self.bind_state()

    def bind_state(self) -> None:
        """Be the state that the worker's core speaks of; there is one at a time."""
        order = self.sampler.order if self.sampler is not None else None
        made = Position(
            self.progress, has_state=self.has_state, order=order, copies_parameters=self._snapshot, keeper=self
        )
        self._position = self._job.bind_position(self._position, made)

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
        self._job.commit()

    def save(self, part: p.SaveScope) -> None:
        if part is p.SaveScope.AT_COMMIT:
            self._saved["values"] = copied(self._dump_values(), self._saved["values"], self._copy_tensor)
            self._saved["settings"] = self._dump_settings()
        elif self.rate is not None:
            self._saved["rate"] = self.rate.state

    def restore(self) -> None:
        """Go back to what was saved."""
        self._position.require_fresh()
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
        order = self.sampler.order if self.sampler is not None else None
        return DataFacts.of(self._job.worker_id, self._job.policy, order, self.sources)

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
        self._job.loaded(Progress(**state["progress"]))

    def write(self, file: IO[bytes], **more: Any) -> None:
        """All of the state, for a worker of the same job, or of one that goes on from it. ``more``: beside it."""
        beside = {BESIDE: self.beside[0]()} if self.beside is not None else {}
        self._dump_to({**self.sent(), **beside, **more}, file)

    def unpack(self, file: IO[bytes]) -> Any:
        """What `write` has written; nothing is loaded."""
        return self._load_from(file)

    def read(self, file: IO[bytes]) -> None:
        """Load what another worker has written, into the job's own folder."""
        self.load(self.unpack(file))

    def load(self, unpacked: dict[str, Any]) -> None:
        self.load_state_dict(unpacked)
        if self.beside is not None and BESIDE in unpacked:
            self.beside[1](unpacked[BESIDE])

    @property
    def origin(self) -> dict[str, Any]:
        """What a position within an epoch depends on, as far as it is known."""
        order = self.sampler.order if self.sampler is not None else None
        return {"samples": order.samples, "seed": order.seed, "shuffle": order.shuffle} if order is not None else {}

    def misfit(self, saved: dict[str, Any]) -> str:
        """Why the state that was saved is not one of this model and optimizer; empty if nothing speaks against it."""
        return difference(saved["model"], self._dump_own()["model"])

    @property
    def was_given_batches(self) -> bool:
        """The training function, by its loader."""
        return self._position.given > 0

    def require_steps(self) -> None:
        """Training has ended.

        Raises:
            UserError: it has made nothing of its batches.
        """
        if self.step == 0 and self.was_given_batches:
            raise UserError(
                "training has ended without a step, though its loop was given batches: no step() was called of the optimizer that "
                "trains, or each batch was left out"
            )

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
    def _cast_end_vote(self, state: int) -> Vote:
        """The collectives of a step, without gradients. ``state``: checksum of the model, 0 for none."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """As the next three, see `elasticdl.elastic.training.pieces.Compared`."""

    @abstractmethod
    def model_parts(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def marks_of(self, arrays: Sequence[Any]) -> Marks: ...

    @abstractmethod
    def host_array(self, value: Any) -> Array: ...

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
        """See `elasticdl.elastic.training.copies.CopyTensor`."""

    @abstractmethod
    def _broadcast(self) -> dict[str, Any]:
        """Rank 0's state, as of `sent`, on members that stand elsewhere."""

    @abstractmethod
    def _broadcast_model(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's, as of `_dump_own`, and its ``values``, on all members."""

    def _makes_the_model(self, value: Any) -> bool:
        """Whether this value, given along, decides what becomes of the parameters."""
        return False

    # -- what the members compare --

    def other_parts(self) -> Mapping[str, Any]:
        return others_of({n: v for n, v in self.values.items() if not self._makes_the_model(v)}, self._shown_name)

    def _shown_name(self, name: str) -> str:
        """Of a value, for people."""
        return name

    def take_over(self) -> None:
        held = {name: value for name, value in self.values.items() if self._makes_the_model(value)}
        received = self._broadcast_model({name: value.state_dict() for name, value in held.items()})
        self._load_own(received)
        for name, value in held.items():
            value.load_state_dict(received["values"][name])

    def last_step_made(self) -> None:
        """There may be no further step, and what the script does with the model from here on is its own affair."""
        self._check.last_step_made(self.step)

    def cast_end_vote(self) -> Vote:
        """The collectives of a step, without gradients: this worker's training function has returned."""
        if self._ends_with_function:
            self.last_step_made()
        vote = self._cast_end_vote(self._check.last_ballot(self.step))
        if vote.ended == self._job.world.size:
            self._check.ended(one_state=vote.one_state)
        return vote

    # -- a step --

    @property
    def _wants_to_stop(self) -> bool:
        return self.stopping and self._job.world.rank == 0

    def _voted(self, vote: Vote, device_seconds: float = 0.0) -> None:
        """The gradients of all members have arrived; see `JobContext.voted`.

        Raises:
            RuntimeError: the members do not make the same step.
            UserError: the batch of this worker, or that of others, is not the same as that of rank 0.
            WorldBroken: a worker that came later is refused.
        """
        difference = ""
        if not vote.one_batch and not vote.ended:
            difference = self._batch_check.difference(self._position)
            vote = replace(vote, one_batch=not difference)
        if not difference and not vote.ended:
            self._check.voted(one_state=vote.one_state)
        self._job.voted(vote, self._remedy, device_seconds, difference)

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
        self._job.step_made(self.learning_rate, self._check.workers)
        self._check.step_made()

    # -- saving --

    def _dump_values(self) -> dict[str, Any]:
        return {name: v.state_dict() if is_stateful(v) else v for name, v in self.values.items()}

    def _load_values(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            present = self.values.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(value)
            else:
                self.values[name] = value
