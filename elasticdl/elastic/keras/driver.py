"""A training with Keras's callbacks whose workers come and go: `fit` and the model zoo's learner drive it alike.

Every worker runs the callbacks, with the same logs; those that write something for the whole job run on rank 0 only. What a
callback keeps (the best value so far, epochs without improvement; see `Keeper`) belongs to the job: a newcomer
receives that of rank 0, and a checkpoint holds it. So a hook need not be repeated where a newcomer joins or a training is resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import plain_values, put
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.epochs import EpochLedger
from elasticdl.elastic.training.evaluation import from_root, of_all
from elasticdl.elastic.training.pieces import Local
from elasticdl.tensorflow import keras

# Attributes that Keras itself sets; the sign of ``min_delta`` at the end of the first epoch that a worker sees.
FOREIGN = ("model", "_model", "params", "min_delta")
AT_STEPS = ("on_train_batch_begin", "on_batch_begin", "on_train_batch_end", "on_batch_end")

Attributes = dict[str, Any]


class Keeper:
    """What one callback keeps in its attributes: plain values that have changed since it began travel; all else is each worker's own."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.has_begun = False
        self._note()

    def begin(self) -> None:
        """It has seen the beginning of training. What it keeps now is as the user has configured it, perhaps anew."""
        self.has_begun = True
        self._note()

    def changed(self) -> Attributes:
        """By reference."""
        return {
            name: value
            for name, value in plain_values(self.callback, FOREIGN).items()
            if name not in self._first or plain_data.checksum(value) != plain_data.checksum(self._first[name])
        }

    def put(self, changed: Attributes) -> None:
        """What has changed on another worker, perhaps."""
        put(self.callback, {**deepcopy(self._first), **changed})

    def _note(self) -> None:
        self._first = deepcopy(plain_values(self.callback, FOREIGN))


ON_RANK_0 = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)


class KerasDriver(Local):
    """Calls Keras's callbacks around steps, evaluations and epochs, and keeps them alike on all members: what they keep is a piece of the state."""

    name = "callbacks"
    travels = True

    def __init__(
        self,
        context: ElasticContext,
        state: KerasState,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        epochs: int,
        steps: int,
        verbose: int = 0,
    ) -> None:
        """``epochs``, ``steps`` of one, and ``verbose``: as callbacks find them in their ``params``. The state's values hold the ledger.

        Raises:
            UserError: there is a callback whose work is done otherwise here.
        """
        refuse_needless(callbacks)
        self.callbacks = list(callbacks)
        self.params = {"verbose": verbose, "epochs": epochs, "steps": steps}
        self.sees_steps = False  # a callback that runs here looks at steps
        self.may_stop_after_step = any(looks_at_steps(each) and not _writes(each) for each in callbacks)
        self._context = context
        self._state = state
        self._model = state.model
        self._ledger: EpochLedger = state.values["ledger"]
        self._keepers = [Keeper(callback) for callback in callbacks]
        self._active: list[keras.callbacks.Callback] = []  # those that run here
        self._begun_epoch = self._ended_epoch = -1
        self._begun_step = 0
        self._ended = False
        self._logs: dict[str, float] = {}
        self._model.stop_training = False
        state.hold_first(self)

    # -- what the members do together --

    def enter(self, world: World, *, began: bool = True) -> None:
        """Begin those that run here; before the members are brought to one state, which undoes what a newcomer's do.

        ``began``: if members hold state, this training was begun by them, and is not the next one.
        """
        here = [each for each in self._keepers if world.rank == 0 or not _writes(each.callback)]
        self._active = [each.callback for each in here]
        self.sees_steps = any(map(looks_at_steps, self._active))
        for keeper in here:
            if not keeper.has_begun:
                self._begin(keeper, resumes=began and not world.is_first)

    def agree(self) -> bool:
        """Take over what those of rank 0's callbacks keep that run only there; tell whether rank 0 wants to stop.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        self._context.advance(Activity.WAIT)
        world = self._context.world
        if self.callbacks and world.size > 1:
            kept = {str(number): each.changed() for number, each in enumerate(self._keepers) if _writes(each.callback)}
            mine = {"stop": bool(self._model.stop_training), "kept": kept} if world.rank == 0 else None
            roots = from_root(self._context.collective, mine, "elasticdl.callbacks")
            if world.rank != 0:
                self._load(roots["kept"])
            self._model.stop_training = roots["stop"]
        self._context.advance(Activity.UPDATE)
        return bool(self._model.stop_training)

    def stops_after_step(self) -> bool:
        """Whether rank 0 wants to stop, now that its callbacks have seen a step; a wish of before the step comes with its votes.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        if not self.may_stop_after_step:
            return False
        if self._context.size > 1:
            stop = bool(self._model.stop_training)
            self._model.stop_training = bool(of_all(self._context.collective, stop, "elasticdl.stop")[0])
        return bool(self._model.stop_training)

    def dump(self) -> Attributes:
        """What a newcomer or a resumed training needs; by reference."""
        return {
            "callbacks": {str(number): keeper.changed() for number, keeper in enumerate(self._keepers)},
            "begun_epoch": self._begun_epoch,
            "ended_epoch": self._ended_epoch,
            "begun_step": self._begun_step,
            "ended": self._ended,
        }

    def load(self, dumped: Attributes) -> None:
        """An epoch that has begun on others, or before a stop, begins here; what the callbacks keep and set is that of the others."""
        if self._begun_epoch < dumped["begun_epoch"]:
            for callback in self._active:
                callback.on_epoch_begin(dumped["begun_epoch"], {})
        self._begun_epoch, self._ended_epoch = dumped["begun_epoch"], dumped["ended_epoch"]
        self._begun_step, self._ended = dumped["begun_step"], dumped["ended"]
        self._load(dumped["callbacks"])

    def compared(self) -> dict[str, Any]:
        """What travels, by the callbacks' names; of those that run on every worker."""
        shared = [each for each in self._keepers if not _writes(each.callback)]
        names = [type(each.callback).__name__ for each in shared]
        titles = [name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names)]
        return {"callbacks": {title: each.changed() for title, each in zip(titles, shared, strict=True)}}

    # -- epochs, steps and evaluations, in Keras's order --

    def on_epoch_begin(self, epoch: int) -> None:
        if self._begun_epoch < epoch:
            self._begun_epoch = epoch
            self.tell("on_epoch_begin", epoch, {})

    def make_step(self, batch: StepBatch) -> float:
        """As `KerasState.make_step`."""
        step = self._state.step + 1
        if self._begun_step < step:  # else it was torn, and is made again
            self._begun_step = step
            self.tell("on_train_batch_begin", self._ledger.epoch_steps, {})
        return self._state.make_step(batch)

    def after_step(self, logs: Mapping[str, float]) -> None:
        """The step is in the ledger, but not committed yet. ``logs``: over the epoch so far."""
        self.tell("on_train_batch_end", self._ledger.epoch_steps - 1, dict(logs))

    @contextlib.contextmanager
    def testing(self) -> Iterator[dict[str, float]]:
        """Around an evaluation, which puts its metrics into what is given; whether or not it comes to its end."""
        logs: dict[str, float] = {}
        self.tell("on_test_begin", {})
        try:
            yield logs
        finally:
            self.tell("on_test_end", logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        if self._ended_epoch < epoch:
            self._ended_epoch = epoch
            self._logs = dict(logs)
            self.tell("on_epoch_end", epoch, self._logs)

    def complete(self) -> None:
        """All steps are made. What the callbacks make of the model now is what is exported; the same twice is the same once."""
        if self.params["epochs"]:  # as Keras has it
            self._state.optimizer.finalize_variable_values(self._model.trainable_variables)
        if not self._ended:
            self._ended = True
            self.tell("on_train_end", self._logs)

    def tell(self, hook: str, *arguments: Any) -> None:
        for callback in self._active:
            getattr(callback, hook)(*arguments)
        self._state.stopping = bool(self._model.stop_training)
        self._state.keep_settings()  # no hook is called twice for one step or epoch

    # -- what callbacks keep --

    def _begin(self, keeper: Keeper, *, resumes: bool) -> None:
        callback = keeper.callback
        if resumes and isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # another worker has begun the file
        kept = keeper.changed()
        callback.set_model(self._model)
        callback.set_params(self.params)
        callback.on_train_begin({})
        keeper.begin()
        put(callback, kept)

    def _load(self, kept: Mapping[str, Attributes]) -> None:
        for number, changed in kept.items():
            if int(number) < len(self._keepers):  # else the module had more of them when it was packed
                self._keepers[int(number)].put(changed)


def looks_at_steps(callback: keras.callbacks.Callback) -> bool:
    """At each, by a hook of its class, or one that was put into it, as of a LambdaCallback."""
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in AT_STEPS)


def _writes(callback: keras.callbacks.Callback) -> bool:
    """For the whole job, so it runs on rank 0."""
    return isinstance(callback, ON_RANK_0)


def refuse_needless(callbacks: Iterable[Any]) -> None:
    """Raises UserError if there is one whose work is done otherwise here."""
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise UserError("callbacks: BackupAndRestore is not needed: leave it out; a stopped job goes on where it stood")
