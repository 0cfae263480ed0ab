"""Keras's own callbacks in a training whose workers come and go.

Every worker runs them, with the same logs; those that write something for the whole job run on rank 0 only. What a
callback keeps (the best value so far, epochs without improvement; see `callback_state`) belongs to the job: a newcomer
receives that of rank 0, and a checkpoint holds it. So a hook need not be repeated where a newcomer joins or a training is resumed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.world import World
from elasticdl.elastic.keras import callback_state
from elasticdl.elastic.keras.callback_outside import Outside
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import CONTENT
from elasticdl.elastic.training.epochs import EpochLedger
from elasticdl.elastic.training.state import TrainingState
from elasticdl.tensorflow import keras

ON_RANK_0 = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
# That look at steps and never end the training by what they see. OrbaxCheckpoint and the like are of no account: they are told on rank 0.
NEVER_STOP = (
    *ON_RANK_0,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)

Attributes = dict[str, Any]

KEPT = ("before", "factor", "epoch", "asked", "answer")


class KerasRate:
    """The rate by a schedule of the epoch, which elastic training wants to know anew when the world changes.

    Keras asks a schedule once an epoch, and may hand it the rate so far. So does this, on all workers together: one that comes later
    has the answer of the others. What a callback makes of the rate besides is a factor on the schedule's.
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
            self.factor = 1.0  # it starts from what callbacks have left, or does not care
        self.epoch = epoch

    @contextlib.contextmanager
    def watched(self, state: TrainingState) -> Iterator[None]:
        """What callbacks within set the optimizer's rate to stays in force, also if it goes by rules."""
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


class _Unwritten:
    """A model that a callback may save where another worker does so: nothing is written, and the callback counts on."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *_: Any, **__: Any) -> None: ...

    def save_weights(self, *_: Any, **__: Any) -> None: ...


class KerasCallbacks:
    """Calls Keras's callbacks, and keeps them alike on all members."""

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        params: Mapping[str, Any],
        model: keras.Model,
        state: KerasState,
        rate: KerasRate,
    ) -> None:
        """``params``: as of `keras.callbacks.Callback.set_params`. The state's values hold the ledger.

        Raises:
            UserError: there is one whose work is done otherwise here.
        """
        refuse_needless(callbacks)
        self._callbacks = list(callbacks)
        self.params = dict(params)
        self._model = model
        self._state = state
        self._rate = rate
        self._ledger: EpochLedger = state.values["ledger"]
        self._active: list[keras.callbacks.Callback] = []  # those that run here
        self._begun: set[int] = set()  # numbers of those that have seen the beginning of training in this process
        self._first = [callback_state.take(callback) for callback in callbacks]  # what they kept at that time
        self._outside: dict[int, Outside] = {}
        self._named: set[tuple[int, str]] = set()  # what is known not to travel
        self._begun_epoch = self._ended_epoch = -1
        state.before_load, state.callbacks_parts = self._catch_up, self._compared
        self._begun_step = 0
        self._ended = False
        self._logs: dict[str, float] = {}
        self._may_stop_after_step = any(looks_at_steps(each) and type(each) not in NEVER_STOP for each in callbacks)
        model.stop_training = False

    # -- what the members do together --

    def enter(self, world: World, *, began: bool = True) -> None:
        """Begin those that run here; before the members are brought to one state, which undoes what a newcomer's do.

        ``began``: if members hold state, this training was begun by them, and is not the next one.
        """
        writes = world.rank == 0
        here = [
            n for n, each in enumerate(self._callbacks) if writes or _counts(each) or not isinstance(each, ON_RANK_0)
        ]
        self._active = [self._callbacks[number] for number in here]
        for number in here:
            if number not in self._begun:
                self._begun.add(number)
                self._begin(number, resumes=began and not world.is_first)
            if _counts(callback := self._callbacks[number]):
                callback.set_model(self._model if writes else _Unwritten(self._model))

    def agree(self, collective: Collective, *, entering: bool) -> bool:
        """Take over what rank 0's callbacks keep, as far as it is needed; tell whether rank 0 wants to stop.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        world = collective.world
        if not self._callbacks or world.size == 1:
            return bool(self._model.stop_training)
        whole = entering and world.needs_sync
        wanted = self._callbacks if whole else [each for each in self._callbacks if isinstance(each, ON_RANK_0)]
        mine = {"stop": bool(self._model.stop_training), "kept": self.pack(wanted)} if world.rank == 0 else {}
        received = plain_data.loads(collective.broadcast_bytes(plain_data.dumps(mine), "elasticdl.callbacks"))
        if whole and not world.stands_with_root(world.rank):
            self.unpack(received["kept"])
        elif not whole and world.rank != 0:
            self._load(received["kept"]["callbacks"])
        self._model.stop_training = received["stop"]
        return bool(received["stop"])

    def stop_after_step(self, collective: Collective) -> bool:
        """Whether rank 0 wants to stop, now that its callbacks have seen a step.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        stop = bool(self._model.stop_training)
        if self._may_stop_after_step and collective.world.size > 1:
            wish = np.asarray([float(stop and collective.world.rank == 0)])
            stop = self._model.stop_training = bool(np.asarray(collective.sum(wish, "elasticdl.stop"))[0])
            return stop
        return stop and collective.world.size == 1

    def pack(self, callbacks: Iterable[keras.callbacks.Callback] | None = None) -> Attributes:
        """What a newcomer or a resumed training needs; by reference."""
        wanted = self._callbacks if callbacks is None else callbacks
        numbers = [number for number, each in enumerate(self._callbacks) if each in wanted]
        for number in numbers:
            self._name_what_stays(number)
        return {
            "callbacks": {str(number): self._kept(number) for number in numbers},
            "begun_epoch": self._begun_epoch,
            "ended_epoch": self._ended_epoch,
            "begun_step": self._begun_step,
            "ended": self._ended,
            "rate": self._rate.kept(),
        }

    def unpack(self, packed: Attributes) -> None:
        self._begun_epoch, self._ended_epoch = packed["begun_epoch"], packed["ended_epoch"]
        self._state.begun_epoch = self._begun_epoch
        self._begun_step, self._ended = packed["begun_step"], packed["ended"]
        self._rate.load(packed["rate"])
        self._load(packed["callbacks"])

    # -- what the trainer tells --

    def on_epoch_begin(self, epoch: int) -> None:
        if self._begun_epoch < epoch:
            self._begun_epoch = self._state.begun_epoch = epoch
            self._rate.begin_epoch(epoch)
            # A schedule is asked by the training state: when the world changes as well.
            self.tell("on_epoch_begin", epoch, {}, but=keras.callbacks.LearningRateScheduler)

    def before_step(self) -> None:
        step = self._state.step + 1
        if self._begun_step < step:  # else it was torn, and is made again
            self._begun_step = step
            self.tell("on_train_batch_begin", self._ledger.epoch_steps, {})
        self._state.stopping = bool(self._model.stop_training)

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

    def end(self) -> None:
        """Training is over; what they make of the model now is what is exported."""
        if not self._ended:
            self._ended = True
            self.tell("on_train_end", self._logs)

    # -- details --

    def tell(self, hook: str, *arguments: Any, but: type | tuple[type, ...] = ()) -> None:
        with self._rate.watched(self._state):
            for callback in self._active:
                if not isinstance(callback, but):
                    getattr(callback, hook)(*arguments)
        self._state.keep_settings()  # no hook is called twice for one step or epoch

    def _catch_up(self, epoch: int) -> None:
        """Begin an epoch that has begun before this worker came, or the training was resumed; what it sets is loaded next."""
        if self._begun_epoch < epoch:
            self._begun_epoch = self._state.begun_epoch = epoch
            for callback in self._active:
                if not isinstance(callback, keras.callbacks.LearningRateScheduler):
                    callback.on_epoch_begin(epoch, {})

    def _begin(self, number: int, *, resumes: bool) -> None:
        callback = self._callbacks[number]
        if resumes and isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # another worker has begun the file
        kept = self._kept(number)
        callback.set_model(self._model)
        callback.set_params(self.params)
        callback_state.choose_direction(callback)
        with self._rate.watched(self._state):
            callback.on_train_begin({})
        for inner in callback_state.held(callback):
            callback_state.choose_direction(inner)
        self._first[number] = callback_state.take(callback)
        self._outside[number] = Outside(callback)
        callback_state.put(callback, kept)

    def _compared(self) -> dict[str, Any]:
        """What travels, by the callbacks' names; of those that run on every worker."""
        kept = {
            number: self._kept(number) for number, each in enumerate(self._callbacks) if not isinstance(each, ON_RANK_0)
        }
        names = [type(self._callbacks[number]).__name__ for number in kept]
        shown = [
            name if names.count(name) == 1 else f"{name}#{number}" for name, number in zip(names, kept, strict=True)
        ]
        every = ({name.removeprefix(CONTENT): each for name, each in one.items()} for one in kept.values())
        return {"callbacks": dict(zip(shown, every, strict=True))}

    def _kept(self, number: int) -> Attributes:
        """What has changed since the beginning. What has not is as the user has configured it, perhaps anew."""
        return callback_state.changed(self._callbacks[number], self._first[number])

    def _name_what_stays(self, number: int) -> None:
        callback = self._callbacks[number]
        for attribute in callback_state.left_behind(callback):
            if (number, attribute) not in self._named:
                self._named.add((number, attribute))
                self._state.warn(
                    f"the callback {type(callback).__name__} has {attribute}, which is not sent to workers that join: there it "
                    "is as on_train_begin left it; numbers, texts, arrays, collections and dataclasses of these, enums, variables "
                    "and metrics are sent"
                )

        for title in self._outside[number].changed() if number in self._outside else ():
            self._state.warn(
                f"the callback {type(callback).__name__} has changed {title}, which is not sent to workers that join: keep it in an attribute "
                "of the callback"
            )

    def _load(self, kept: Mapping[str, Attributes]) -> None:
        for number, changed in kept.items():
            if int(number) < len(self._callbacks):  # else the module had more of them when it was packed
                callback = self._callbacks[int(number)]
                present = callback_state.take(callback, copy=False)
                # What is no plain data now (an open file) stays.
                first = {name: value for name, value in self._first[int(number)].items() if name in present}
                callback_state.put(callback, {**deepcopy(first), **changed})


def looks_at_steps(callback: keras.callbacks.Callback) -> bool:
    """After each, by a hook of its class, or one that was put into it, as of a LambdaCallback."""
    base = keras.callbacks.Callback
    hooks = {"on_train_batch_end": base.on_train_batch_end, "on_batch_end": base.on_batch_end}
    return any(getattr(getattr(callback, name), "__func__", None) is not nothing for name, nothing in hooks.items())


def _counts(callback: keras.callbacks.Callback) -> bool:
    """It saves after so many steps, and has to count them wherever it may go on."""
    return type(callback) is keras.callbacks.ModelCheckpoint


def refuse_needless(callbacks: Iterable[Any]) -> None:
    """Raises UserError if there is one whose work is done otherwise here."""
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise UserError("callbacks(): BackupAndRestore is not needed: give --checkpoint_dir, and leave it out")
