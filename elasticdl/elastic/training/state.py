"""The training state: a list of pieces, and the steps by which they change. The part that all frameworks share.

Where training stands, and what of it is safe when, is the business of the worker's core
(`elasticdl.elastic.core.training_step`). When the core says so, the pieces are kept, or undone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import IO, Any, ClassVar, NoReturn

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import memory_of_the_worker
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.learning_rate import LearningRate, RateControl
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.training_step import Position, Vote
from elasticdl.elastic.training.check import Check
from elasticdl.elastic.training.cursor import Ordered
from elasticdl.elastic.training.data_facts import DataFacts
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.pieces import (
    FollowedRate,
    InHand,
    Piece,
    Settings,
    Standing,
    Tensors,
    Value,
    dump_all,
    load_all,
)


class TrainingState(ABC):
    """A list of pieces: model, optimizer, position in the data, and any further values as attributes.

    Objects with ``state_dict`` and ``load_state_dict`` are sent and restored through these, other values are pickled. What a front
    end adds is pieces: those of its framework, and those that it gives as values.
    """

    _remedy: str  # for a step on too few samples
    _ends_with_function = True  # training is over when the script's function returns
    _value_piece: ClassVar[type[Value]] = Value
    _is_made = False  # till then it sets its own names
    values: dict[str, Any]

    def __init__(
        self,
        job: JobContext,
        tensors: Tensors,
        settings: Settings,
        sampler: Ordered | None,
        values: dict[str, Any],
        *,
        start: Progress | None = None,
        has_state: bool = False,
    ) -> None:
        """``start``: where training stands, if not at its beginning.

        Raises:
            UserError: a value has the name of what the state has itself.
        """
        self.__dict__["values"] = values
        for name in values:
            if name == "values" or name.startswith("_") or hasattr(type(self), name):
                self._refuse(name)
        self.sampler = sampler
        self.settings = settings
        self.sources = list(sampler.sources) if sampler is not None else []  # the data, as others must have them
        self.stopping = False  # this member's vote for ending the training; only rank 0's is looked at
        self.resumed: tuple[str, Mapping[str, Any]] | None = None  # a kept state that was loaded, and its origin
        self.cannot_be_kept = ""  # why no other job could go on from it, if so
        self._position = Position(start, has_state=has_state)
        self._job = job
        self._tensors = tensors
        self._loss = float("nan")
        self._told_in = -1  # version of the world in which those that come later were told of data and model
        self._rate = FollowedRate()
        self._framework_pieces: tuple[Piece, ...] = ()
        self._value_pieces: dict[str, Piece] = {}
        self._common_pieces: list[Piece] = [settings, self._rate, Standing(lambda: self.progress, self._stands_at)]
        if sampler is not None:
            self._common_pieces.append(InHand(sampler.drop))
            sampler.settings_changed = settings.changed
            sampler.step_begins = self._step_begins
        self._check = Check(job, self, tensors, lambda: self._position, self._data_facts)
        self.bind_state()

    def _hold(self, *pieces: Piece) -> None:
        """Have these pieces of a framework, which are loaded and undone in this order, before all others."""
        self._framework_pieces = pieces
        self._is_made = True
        for piece in self.pieces:
            piece.keep()

    @property
    def pieces(self) -> list[Piece]:
        """All that the job knows of this training."""
        known = self._value_pieces
        if known.keys() != self.values.keys():
            self._value_pieces = known = {
                name: value if isinstance(value, Piece) else known.get(name, self._value_piece(name, self.values))
                for name, value in self.values.items()
            }
        return [*self._framework_pieces, *known.values(), *self._common_pieces]

    def bind_state(self) -> None:
        """Be the state that the worker's core speaks of; there is one at a time."""
        order = self.sampler.order if self.sampler is not None else None
        made = Position(self.progress, has_state=self.has_state, order=order, keeper=self)
        self._position = self._job.bind_position(self._position, made)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            title = type(self).__name__
            raise AttributeError(f"the state has no {name!r}; give it as {title}({name}=...)") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.values:
            super().__setattr__(name, value)
        elif self._is_made:
            self.values[name] = value
        else:
            self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UserError(
            f"{type(self).__name__}({name}=...): the state has a {name} of its own: give the value another name"
        )

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
    def learning_rate(self) -> float:
        """The optimizer's present one; of several parameter groups the first's."""
        return self.settings.rate

    @property
    def rate(self) -> RateControl | None:
        """The rules by which the learning rate goes, if it goes by any."""
        return self._rate.control

    def follow(self, rules: LearningRate) -> None:
        """Let the learning rate go by these rules: it is set before each update of the parameters.

        Raises:
            UserError: the rules do not fit the batch policy, or the optimizer.
        """
        self._rate.control = RateControl(rules, self.settings.own_rate(), fixed_batch=self._job.policy.fixed)

    def commit(self) -> None:
        """Declare everything up to here safe; cheap. Make it the last thing of each step.

        At the end of an epoch, after its last batch, it ends the epoch: what comes before it is not done again.

        Raises:
            WorldChanged: all members agreed in the last step to leave this world.
        """
        self._job.commit()

    # -- all pieces --

    def save(self, scope: p.SaveScope) -> None:
        for piece in self.pieces:
            if piece.kept_with is scope:
                piece.keep()

    def restore(self) -> None:
        """Go back to what was saved."""
        for piece in self.pieces:
            piece.undo()

    def keep_settings(self) -> None:
        """What has been set of the optimizer since the last commit stays if a step is torn: it won't be set again."""
        self.settings.keep()

    def require_jobs_facts(self) -> None:
        """Before this worker asks for its first world, which it would only break.

        Raises:
            UserError: it has other data than the job, or another model.
        """
        self._data_facts().require_same(self._job.session.jobs_facts())

    def sync(self, world: World) -> None:
        """Bring every member to rank 0's state; sends nothing when all stand after the same step.

        Raises:
            UserError: this worker has another model or optimizer than rank 0.
            WorldBroken: this worker's own state is untouched.
        """
        if world.needs_sync and world.size > 1:
            is_root = world.rank == 0
            received = self._tensors.broadcast(self.sent() if is_root else {})
            if not is_root and not world.stands_with_root(world.rank):
                with memory_of_the_worker("the training state"):
                    self.receive(received)

    def receive(self, sent: dict[str, Any]) -> None:
        """Another worker has sent this, or a job that was stopped has kept it."""
        self.load_state_dict(sent)

    def take_over(self) -> None:
        """On all members, be at rank 0's model."""
        making = [each for each in self.pieces if each.makes_model]
        load_all(making, self._tensors.broadcast(dump_all(making, to_send=True), to_all=True))

    def state_dict(self) -> dict[str, Any]:
        """Everything; the content of a checkpoint."""
        return dump_all(each for each in self.pieces if each.travels and each.in_checkpoints)

    def sent(self, *, to_file: bool = False) -> dict[str, Any]:
        """All that another worker of the job is given, as it is between two steps."""
        return dump_all((each for each in self.pieces if each.travels), to_send=not to_file)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.update({name: value for name, value in state["values"].items() if name not in self.values})
        load_all((each for each in self.pieces if each.travels), state)

    def write(self, file: IO[bytes], **more: Any) -> None:
        """All of the state, for a worker of the same job, or of one that goes on from it. ``more``: beside it."""
        self._tensors.write({**self.sent(to_file=True), **more}, file)

    def unpack(self, file: IO[bytes]) -> Any:
        """What `write` has written; nothing is loaded."""
        return self._tensors.read(file)

    def load(self, unpacked: dict[str, Any]) -> None:
        self.receive(unpacked)

    def _stands_at(self, progress: Progress) -> None:
        """A state was loaded that stands there."""
        self._job.loaded(progress)

    @property
    def origin(self) -> dict[str, Any]:
        """What a position within an epoch depends on, as far as it is known."""
        order = self.sampler.order if self.sampler is not None else None
        return {"samples": order.samples, "seed": order.seed, "shuffle": order.shuffle} if order is not None else {}

    def _data_facts(self) -> DataFacts:
        order = self.sampler.order if self.sampler is not None else None
        return DataFacts.of(self._job.policy, order, self.sources, self._shapes())

    def _shapes(self) -> dict[str, str]:
        """Of the model's parameters, with their types, by name."""
        return {}

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

    def oversight(self) -> str:
        """What looks forgotten in a training that has ended; empty if nothing does."""
        return self._position.oversight()

    # -- the end --

    @abstractmethod
    def _cast_end_vote(self, state: int) -> Vote:
        """The collectives of a step, without gradients. ``state``: checksum of the model, 0 for none."""

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
        else:
            self._check.judge_end(vote, "has ended")
        return vote

    # -- a step --

    def _step_begins(self) -> None:
        """Nothing of the state has been touched for it."""
        self._check.begin(self.progress)

    @property
    def has_trained(self) -> bool:
        """This worker has made a step."""
        return self._position.made > 0

    @property
    def _wants_to_stop(self) -> bool:
        return self.stopping and self._job.world.rank == 0

    def _voted(self, vote: Vote, device_seconds: float = 0.0) -> None:
        """The gradients of all members have arrived; see `JobContext.voted`.

        Raises:
            UserError: the members do not make the same step.
            UserError: the batch or the state of this worker, or that of others, is not the same as that of rank 0.
            WorldBroken: a worker that came later is refused.
        """
        self._job.voted(self._check.judge(vote), self._remedy, device_seconds)

    def _before_update(self) -> None:
        """The parameters change next."""
        if self.rate is not None:
            plan = self._position.batch
            step, epoch = (plan.step, plan.epoch) if plan else (self.step + 1, self.progress.epoch)
            self.settings.set_rate(self.rate.at(step, epoch, self._job.world))

    def _step_made(self) -> None:
        """The parameters have changed."""
        assert self.vote is not None, "a step is made after its vote"
        self._loss = self.vote.loss
        if self.rate is not None:
            self.rate.made()
        self._job.step_made(self.learning_rate, self._check.workers)
        self._check.step_made()
        world = self._job.world
        if world.rank == 0 and world.version != self._told_in and self._job.under_master:
            self._told_in = world.version
            self._job.session.tell_facts(self._data_facts().to_bytes())
