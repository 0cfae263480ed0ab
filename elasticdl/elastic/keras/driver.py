"""A training with Keras's callbacks whose workers come and go: `fit` and the model zoo's learner drive it alike.

Every worker runs the callbacks, with the same logs; those that write something for the whole job run on rank 0 only. What a
callback keeps (the best value so far, epochs without improvement; see `callback_state`) belongs to the job: a newcomer
receives that of rank 0, and a checkpoint holds it. So a hook need not be repeated where a newcomer joins or a training is resumed.

And the rate by Keras's schedules, and what callbacks keep, in themselves and outside.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import plain_values, put
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.epochs import EpochLedger
from elasticdl.elastic.training.evaluation import from_root, of_all
from elasticdl.elastic.training.state import TrainingState
from elasticdl.tensorflow import keras, tf

# The learning rate by Keras's schedules of the epoch, in a training whose number of workers changes.

KEPT = ("before", "factor", "epoch", "asked", "answer")


class KerasRate:
    """The rate by a schedule of the epoch; elastic training asks for it anew when the world changes.

    Keras asks a schedule once an epoch, and may hand it the rate so far. All workers do the same here, and a worker that comes
    later is sent the answer of the others. What a callback makes of the rate besides is a factor on the schedule's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._own = float(optimizer.learning_rate)
        self._schedule: Callable[..., float] | None = None
        self._takes_rate = False
        self.before = self._own
        self.factor = 1.0
        self.epoch = -1  # the last one that has begun
        self.asked = -1  # the last epoch that the schedule was asked for
        self.answer = self._own

    def follow(self, schedule: Callable[..., float], *, may_take_rate: bool) -> None:
        """``may_take_rate``: hand it the rate so far, if it takes a second argument."""
        self._schedule = schedule
        self._takes_rate = may_take_rate and _takes_two(schedule)

    @property
    def has_schedule(self) -> bool:
        return self._schedule is not None

    def __call__(self, epoch: int) -> float:
        """Raises UserError if the schedule returned no rate."""
        return self._scheduled(epoch) * self.factor

    def begin_epoch(self, epoch: int) -> None:
        if self.has_schedule:
            self.before = (self._own if self.epoch < 0 else self._scheduled(self.epoch)) * self.factor
            self.factor = 1.0  # a schedule starts from the rate that callbacks have left, or from none
        self.epoch = epoch

    @contextlib.contextmanager
    def watched(self, state: TrainingState) -> Iterator[None]:
        """What callbacks within set the optimizer's rate to stays in force, also if the rate goes by rules."""
        if state.rate is None:
            yield
            return
        before = state.learning_rate
        yield
        after = state.learning_rate
        if after != before and before:
            self.factor *= after / before
            state.rate.ask_again()

    def kept(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in KEPT}

    def load(self, kept: dict[str, float]) -> None:
        for name in KEPT:
            setattr(self, name, kept.get(name, getattr(self, name)))

    def _scheduled(self, epoch: int) -> float:
        if self._schedule is None or self.asked == epoch:
            return self.answer
        rate = self._schedule(epoch, self.before) if self._takes_rate else self._schedule(epoch)
        if isinstance(rate, bool) or not hasattr(rate, "__float__") or np.ndim(rate):
            raise UserError(
                f"LearningRateScheduler: its function gave {rate!r} for epoch {epoch}, counted from 0; it must return the "
                "learning rate, a number"
            )
        self.asked, self.answer = epoch, float(rate)
        return self.answer


def _takes_two(schedule: Callable[..., float]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.0)
    except (TypeError, ValueError):  # a ValueError: some builtins tell nothing about themselves
        return False
    return True


# What a callback keeps in its attributes: plain values travel to other workers and into checkpoints.

KERAS_KNOWN = "3.15"
GREATEST_IS_BEST = ("acc", "auc", "fmeasure")  # in a metric's name
FOREIGN = ("model", "_model", "params")  # attributes that Keras itself sets
CHANGE_IN_PLACE = (tf.Variable, keras.Variable, keras.metrics.Metric, np.random.Generator)

Attributes = dict[str, Any]


def changed(callback: Any, first: Mapping[str, Any]) -> Attributes:
    """Those plain values that are others than the ``first``; by reference."""
    return {
        name: value
        for name, value in plain_values(callback, FOREIGN).items()
        if name not in first or plain_data.checksum(value) != plain_data.checksum(first[name])
    }


def left_behind(callback: Any, before: Mapping[str, Any]) -> list[str]:
    """Attributes that do not travel and were set since ``before``, or change in their place; each with the kind of what it holds."""
    if type(callback).__module__.partition(".")[0] == "keras":
        return []
    return [
        f"{name} ({type(value).__name__})"
        for name, value in vars(callback).items()
        if name not in FOREIGN
        and not plain_data.is_plain(value)
        and (isinstance(value, CHANGE_IN_PLACE) or (before.get(name) is not value and not callable(value)))
    ]


def choose_direction(callback: keras.callbacks.Callback) -> None:
    """Whether the least or the greatest value of what is monitored is the best.

    Keras decides it at the end of the first epoch, and changes ``min_delta`` along with it: too late for a newcomer. It
    knows only metrics that the model was compiled with; for others the name tells, as it did in Keras 2. This is the
    only thing here that Keras has no public function for.
    """
    if getattr(callback, "monitor_op", callback) is not None or callback.model is None:
        return
    choose = getattr(callback, "_set_monitor_op", None)
    if choose is None:
        raise UserError(
            f"{type(callback).__name__} of Keras {keras.__version__} can't be used: elasticdl was made for Keras {KERAS_KNOWN}"
        )
    try:
        choose()
    except ValueError:
        callback.mode = "max" if any(sign in callback.monitor for sign in GREATEST_IS_BEST) else "min"
        choose()


ON_RANK_0 = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
# These look at steps and never end the training by what they see. Those on rank 0 are not asked, whatever they wish.
NEVER_STOP = (
    *ON_RANK_0,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class KerasDriver:
    """Calls Keras's callbacks around steps, evaluations and epochs, and keeps them alike on all members."""

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
        self.rate = KerasRate(state.optimizer)
        self._context = context
        self._state = state
        self._model = state.model
        self._ledger: EpochLedger = state.values["ledger"]
        self._active: list[keras.callbacks.Callback] = []  # those that run here
        self._begun: set[int] = set()  # numbers of those that have seen the beginning of training in this process
        self._first = [
            deepcopy(plain_values(callback, FOREIGN)) for callback in callbacks
        ]  # what they kept at that time
        self._others = [dict(vars(callback)) for callback in callbacks]  # and all that they held
        self._named: set[tuple[int, str]] = set()  # what is known not to travel
        self._ended_epoch = -1
        state.begun.before_load, state.callbacks.compare = self._catch_up, self._compared
        self._begun_step = 0
        self._ended = False
        self._logs: dict[str, float] = {}
        self._may_stop_after_step = any(looks_at_steps(each) and type(each) not in NEVER_STOP for each in callbacks)
        self._model.stop_training = False

    def follow(self, rules: LearningRate | None = None) -> None:
        """Let the learning rate go by the schedules among the callbacks, of which the last one counts.

        ``rules``: others that hold besides; their schedule is ``rate``.
        """
        for callback in self.callbacks:
            if isinstance(callback, keras.callbacks.LearningRateScheduler):
                self.rate.follow(callback.schedule, may_take_rate=True)
        if self.rate.has_schedule or (rules is not None and rules.scaling):
            self._state.follow(rules or LearningRate(self.rate))

    # -- what the members do together --

    def enter(self, world: World, *, began: bool = True) -> None:
        """Begin those that run here; before the members are brought to one state, which undoes what a newcomer's do.

        ``began``: if members hold state, this training was begun by them, and is not the next one.
        """
        writes = world.rank == 0
        here = [number for number, each in enumerate(self.callbacks) if writes or not _writes(each)]
        self._active = [self.callbacks[number] for number in here]
        for number in here:
            if number not in self._begun:
                self._begun.add(number)
                self._begin(number, resumes=began and not world.is_first)

    def agree(self, *, entering: bool) -> bool:
        """Take over what rank 0's callbacks keep, as far as it is needed; tell whether rank 0 wants to stop.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        self._context.advance(Activity.WAIT)
        world = self._context.world
        if self.callbacks and world.size > 1:
            whole = entering and world.needs_sync
            wanted = self.callbacks if whole else [each for each in self.callbacks if _writes(each)]
            mine = {"stop": bool(self._model.stop_training), "kept": self.pack(wanted)} if world.rank == 0 else None
            roots = from_root(self._context.collective, mine, "elasticdl.callbacks")
            if whole and not world.stands_with_root(world.rank):
                self.unpack(roots["kept"])
            elif not whole and world.rank != 0:
                self._load(roots["kept"]["callbacks"])
            self._model.stop_training = roots["stop"]
        self._context.advance(Activity.UPDATE)
        return bool(self._model.stop_training)

    def stops_after_step(self) -> bool:
        """Whether rank 0 wants to stop, now that its callbacks have seen a step.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        stop = bool(self._model.stop_training)
        if self._context.size == 1:
            return stop
        if not self._may_stop_after_step:
            return False  # a wish of before the step comes with its votes
        self._model.stop_training = bool(of_all(self._context.collective, stop, "elasticdl.stop")[0])
        return bool(self._model.stop_training)

    def pack(self, callbacks: Iterable[keras.callbacks.Callback] | None = None) -> Attributes:
        """What a newcomer or a resumed training needs; by reference."""
        wanted = self.callbacks if callbacks is None else callbacks
        numbers = [number for number, each in enumerate(self.callbacks) if each in wanted]
        for number in numbers:
            self._name_what_stays(number)
        return {
            "callbacks": {str(number): self._kept(number) for number in numbers},
            "begun_epoch": self._state.begun.epoch,
            "ended_epoch": self._ended_epoch,
            "begun_step": self._begun_step,
            "ended": self._ended,
            "rate": self.rate.kept(),
        }

    def unpack(self, packed: Attributes) -> None:
        self._state.begun.epoch, self._ended_epoch = packed["begun_epoch"], packed["ended_epoch"]
        self._begun_step, self._ended = packed["begun_step"], packed["ended"]
        self.rate.load(packed["rate"])
        self._load(packed["callbacks"])

    # -- epochs, steps and evaluations, in Keras's order --

    def on_epoch_begin(self, epoch: int) -> None:
        if self._state.begun.epoch < epoch:
            self._state.begun.epoch = epoch
            self.rate.begin_epoch(epoch)
            # A schedule is asked by the training state: when the world changes as well.
            self.tell("on_epoch_begin", epoch, {}, but=keras.callbacks.LearningRateScheduler)

    def make_step(self, batch: StepBatch) -> float:
        """As `KerasState.make_step`."""
        step = self._state.step + 1
        if self._begun_step < step:  # else it was torn, and is made again
            self._begun_step = step
            self.tell("on_train_batch_begin", self._ledger.epoch_steps, {})
        self._state.stopping = bool(self._model.stop_training)
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

    def tell(self, hook: str, *arguments: Any, but: type | tuple[type, ...] = ()) -> None:
        with self.rate.watched(self._state):
            for callback in self._active:
                if not isinstance(callback, but):
                    getattr(callback, hook)(*arguments)
        self._state.keep_settings()  # no hook is called twice for one step or epoch

    # -- what callbacks keep --

    def _catch_up(self, epoch: int) -> None:
        """Begin an epoch that has begun before this worker came, or the training was resumed; what it sets is loaded next."""
        if self._state.begun.epoch < epoch:
            self._state.begun.epoch = epoch
            for callback in self._active:
                if not isinstance(callback, keras.callbacks.LearningRateScheduler):
                    callback.on_epoch_begin(epoch, {})

    def _begin(self, number: int, *, resumes: bool) -> None:
        callback = self.callbacks[number]
        if resumes and isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # another worker has begun the file
        kept = self._kept(number)
        callback.set_model(self._model)
        callback.set_params(self.params)
        choose_direction(callback)
        with self.rate.watched(self._state):
            callback.on_train_begin({})
        self._first[number] = deepcopy(plain_values(callback, FOREIGN))
        self._others[number] = dict(vars(callback))
        put(callback, kept)

    def _compared(self) -> dict[str, Any]:
        """What travels, by the callbacks' names; of those that run on every worker."""
        kept = {number: self._kept(number) for number, each in enumerate(self.callbacks) if not _writes(each)}
        names = [type(self.callbacks[number]).__name__ for number in kept]
        shown = [
            name if names.count(name) == 1 else f"{name}#{number}" for name, number in zip(names, kept, strict=True)
        ]
        return {"callbacks": dict(zip(shown, kept.values(), strict=True))}

    def _kept(self, number: int) -> Attributes:
        """What has changed since the beginning. What has not is as the user has configured it, perhaps anew."""
        return changed(self.callbacks[number], self._first[number])

    def _name_what_stays(self, number: int) -> None:
        callback = self.callbacks[number]
        for attribute in left_behind(callback, self._others[number]):
            if (number, attribute) not in self._named:
                self._named.add((number, attribute))
                self._context.warn(
                    f"the callback {type(callback).__name__} has {attribute}, which is not sent to workers that join: there it "
                    "is as on_train_begin left it; numbers, texts, flags, arrays, and lists and dicts of these are sent"
                )

    def _load(self, kept: Mapping[str, Attributes]) -> None:
        for number, changed in kept.items():
            if int(number) < len(self.callbacks):  # else the module had more of them when it was packed
                put(self.callbacks[int(number)], {**deepcopy(self._first[int(number)]), **changed})


def looks_at_steps(callback: keras.callbacks.Callback) -> bool:
    """After each, by a hook of its class, or one that was put into it, as of a LambdaCallback."""
    base = keras.callbacks.Callback
    hooks = {"on_train_batch_end": base.on_train_batch_end, "on_batch_end": base.on_batch_end}
    return any(getattr(getattr(callback, name), "__func__", None) is not nothing for name, nothing in hooks.items())


def _writes(callback: keras.callbacks.Callback) -> bool:
    """For the whole job, so it runs on rank 0."""
    return isinstance(callback, ON_RANK_0)


def refuse_needless(callbacks: Iterable[Any]) -> None:
    """Raises UserError if there is one whose work is done otherwise here."""
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise UserError("callbacks: BackupAndRestore is not needed: leave it out; a stopped job goes on where it stood")
