"""Keras's optimizers, made to accumulate gradients.

    optimizer = optimizers.Optimizer(keras.optimizers.Adam(), steps=STEPS)
    optimizer = optimizers.Adam(STEPS)

The ready-made ones take ``steps`` first or by name, then what Keras's class of that name takes. Optimizers that are made
of others (LossScaleOptimizer, MultiOptimizer) are given to `Optimizer`.

`Optimizer` wraps one, and makes one step of several micro-batches.

    micro-batch   1 .. steps-1     apply() adds its gradient to the sum
    micro-batch   steps            and gives the weighted mean to the wrapped optimizer, which makes its step

The wrapped optimizer never sees a micro-batch. So all that it does with a gradient, and all that it counts (schedules,
averages of weights, bias corrections), it does and counts as if it had been given big batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.ga.keras.accumulation import Accumulation
from elasticdl.ga.steps import ReadyMade, check_samples, checked_steps, ready_made
from elasticdl.tensorflow import keras, tf

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
]

PREFIX = "accumulation_"  # of the names under which a saved state has what is accumulated


@keras.saving.register_keras_serializable(package="elasticdl")
class Optimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """``optimizer``, stepping once for every ``steps`` micro-batches, on the mean of their gradients.

    Hyperparameters, ``learning_rate``, ``iterations`` and whatever else is not mentioned here are those of the wrapped
    optimizer, ``self.optimizer``; ``iterations`` therefore counts optimizer steps.
    """

    built: bool

    def __init__(self, optimizer: keras.optimizers.Optimizer, steps: int, name: str | None = None) -> None:
        """Wrap one of Keras's optimizers.

        Args:
            optimizer: steps on the mean gradients.
            steps: micro-batches per optimizer step, at least 1.
            name: as Keras's; None: that of the optimizer.

        Raises:
            ArgumentError: ``steps`` or the optimizer cannot be right.
            UserError: Keras runs on another backend than TensorFlow, or under ``tf.distribute``.
        """
        steps = checked_steps(steps)
        optimizer = _checked_optimizer(optimizer)
        # A function, so that there is one learning rate only.
        super().__init__(learning_rate=lambda: optimizer.learning_rate, name=name or optimizer.name)
        for attribute in [name for name in self.__dict__ if not name.startswith("_") and name not in ("name", "built")]:
            del self.__dict__[attribute]  # a hyperparameter
        self.optimizer = optimizer
        self._accumulation: Accumulation | None = None
        self._samples: Any = None
        self._by_samples: bool | None = None
        # A variable, so that it may change under a traced step; wrapped, as Keras would save it with the others.
        self._steps = SimpleNamespace(variable=keras.Variable(steps, dtype="int64", trainable=False, name="steps"))

    @property
    def steps(self) -> int:
        """Micro-batches per optimizer step. May be changed at any time, also of a compiled model, and stays what it is
        when a state is loaded; what is accumulated stays."""
        return int(self._steps.variable.numpy())

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps.variable.assign(checked_steps(steps))

    @property
    def accumulated(self) -> int:
        """Micro-batches taken in since the last optimizer step."""
        return int(self._iterations.numpy())

    @property
    def will_step(self) -> bool:
        """Whether the next micro-batch completes the accumulation: the next ``apply()`` changes the variables."""
        return self.accumulated + 1 >= self.steps

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], samples: Any = None) -> Any:
        """As ``apply()``; returns ``iterations``."""
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs], samples)
        return self.iterations

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None, samples: Any = None
    ) -> None:
        """Hand over the gradients of one micro-batch; each ``steps``-th call makes an optimizer step.

        Args:
            grads: one for each variable.
            trainable_variables: those that the gradients are of; None: those that the optimizer was built with.
            samples: what the mean loss of the micro-batch was divided by, if not the same for all of them.

        Raises:
            ArgumentError: the numbers of gradients and variables differ, or ``samples`` is no number above 0.
            UserError: the optimizer is not built, or only some micro-batches came with ``samples``.
        """
        gradients = list(grads)
        if not gradients:
            return  # as in Keras
        accumulation = self._built(trainable_variables)
        variables = accumulation.variables if trainable_variables is None else list(trainable_variables)
        if len(gradients) != len(variables):
            raise ArgumentError(f"{len(gradients)} gradients were given for {len(variables)} variables")
        accumulation.take(gradients, variables, self._weight(samples))
        keras.ops.cond(accumulation.count >= self._steps.variable, self._update, lambda: None)

    def flush(self) -> Any:
        """Make the optimizer step of what is accumulated, if anything: at the end of an epoch.

        True if one was made (inside a ``tf.function`` a tensor). ``fit`` calls it at its end.
        """
        if self._accumulation is None:
            return False
        pending = self._iterations > 0
        keras.ops.cond(pending, self._update, lambda: None)
        self._by_samples = None
        return bool(pending) if tf.executing_eagerly() else pending

    def discard(self) -> None:
        """Forget what is accumulated, and begin anew."""
        self._by_samples = None
        if self._accumulation is not None:
            self._accumulation.clear()

    @contextmanager
    def weighing(self, samples: Any) -> Iterator[None]:
        """Within, ``samples`` for calls of ``apply()`` that cannot be given any: by a model's ``train_step``."""
        self._samples = samples
        try:
            yield
        finally:
            self._samples = None

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        if not self.optimizer.built:
            self.optimizer.build(variables)
        self._accumulation = Accumulation(variables, self._iterations, self.add_variable)
        self.built = True

    def scale_loss(self, loss: Any) -> Any:
        return self.optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """The end of ``fit``: no micro-batch is lost, and then what the wrapped optimizer does then."""
        self.flush()
        self.optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.exclude_from_weight_decay(*args, **kwargs)

    @property
    def iterations(self) -> Any:
        return self.optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.optimizer.learning_rate = learning_rate

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """``optimizer``, by the name under which callbacks of Keras look for it."""
        return self.optimizer

    @property
    def variables(self) -> list[Any]:
        return [*self.optimizer.variables, *self._variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        """That of the wrapped optimizer, and what is accumulated, if anything; either can load the other's."""
        self.optimizer.save_own_variables(store)
        if self.accumulated:
            for index, variable in enumerate(self._variables):
                store[f"{PREFIX}{index}"] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Go on from there, in the middle of an accumulation if it was saved there."""
        names = list(store.keys())
        self.optimizer.load_own_variables({name: store[name] for name in names if not name.startswith(PREFIX)})
        self.discard()
        if f"{PREFIX}0" in names and self.built:
            for index, variable in enumerate(self._variables):
                variable.assign(store[f"{PREFIX}{index}"])

    def get_config(self) -> dict[str, Any]:
        wrapped = keras.saving.serialize_keras_object(self.optimizer)
        return {"optimizer": wrapped, "steps": self.steps, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Optimizer:
        config = copy.deepcopy(config)  # Keras empties what it is given
        config["optimizer"] = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return Optimizer(**config)  # also of a ready-made one

    def __getattr__(self, name: str) -> Any:
        # Hyperparameters, and what the wrapped optimizer has of its own.
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("optimizer")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own or wrapped is None or not hasattr(wrapped, name):
            super().__setattr__(name, value)
            return
        if name == "loss_scale_factor" and isinstance(wrapped, keras.optimizers.LossScaleOptimizer):
            raise UserError(
                "the loss is scaled already, by the optimizer wrapped here: compile with auto_scale_loss=False"
            )
        setattr(wrapped, name, value)

    def __dir__(self) -> list[str]:
        # Keras saves all that it finds here; the state of the wrapped optimizer is in ours.
        return [name for name in super().__dir__() if name not in ("optimizer", "inner_optimizer")]

    def _built(self, variables: Sequence[Any] | None) -> Accumulation:
        if self._accumulation is None:
            if variables is None:
                raise UserError("give the variables, or call build(variables) before apply(gradients)")
            self.build(list(variables))
        assert self._accumulation is not None
        return self._accumulation

    def _update(self) -> None:
        assert self._accumulation is not None
        self.optimizer.apply(self._accumulation.means(), self._accumulation.variables)
        self._accumulation.clear()

    def _weight(self, samples: Any) -> Any:
        samples = self._samples if samples is None else samples
        if not tf.is_tensor(samples):
            check_samples(samples)
        if self._by_samples not in (None, samples is not None):
            raise UserError(
                "give the number of samples to every micro-batch, or to none; to change, call flush() between"
            )
        self._by_samples = samples is not None
        return 1 if samples is None else samples


def _checked_optimizer(optimizer: Any) -> keras.optimizers.Optimizer:
    if keras.backend.backend() != "tensorflow":
        raise UserError(
            f"elasticdl.ga.keras needs Keras on TensorFlow, not on {keras.backend.backend()}: set KERAS_BACKEND"
        )
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UserError("elasticdl.ga.keras works without tf.distribute: use one process per device, or Keras's own")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ArgumentError(
            f"Optimizer(optimizer, steps) wraps a Keras 3 optimizer, not a {kind.__module__}.{kind.__name__}"
        )
    for part in _with_parts(optimizer):
        if isinstance(part, Optimizer):
            raise ArgumentError(f"the optimizer accumulates already, over {part.steps} micro-batches: wrap it once")
        if part.gradient_accumulation_steps:
            raise ArgumentError(
                f"the optimizer accumulates already, over {part.gradient_accumulation_steps} micro-batches: "
                "leave out gradient_accumulation_steps"
            )
    return optimizer


def _with_parts(optimizer: keras.optimizers.Optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizer and those that it wraps."""
    yield optimizer
    if isinstance(optimizer, Optimizer):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield from _with_parts(optimizer.inner_optimizer)
    for part in getattr(optimizer, "optimizers", ()):  # of a MultiOptimizer
        yield from _with_parts(part)


def _ready_made(wraps: type[keras.optimizers.Optimizer]) -> type[Optimizer]:
    made = ready_made(wraps, ReadyMade, Optimizer, place=__name__)
    keras.saving.register_keras_serializable(package="elasticdl")(made)
    return made


Adadelta = _ready_made(keras.optimizers.Adadelta)
Adafactor = _ready_made(keras.optimizers.Adafactor)
Adagrad = _ready_made(keras.optimizers.Adagrad)
Adam = _ready_made(keras.optimizers.Adam)
Adamax = _ready_made(keras.optimizers.Adamax)
AdamW = _ready_made(keras.optimizers.AdamW)
Ftrl = _ready_made(keras.optimizers.Ftrl)
Lion = _ready_made(keras.optimizers.Lion)
Nadam = _ready_made(keras.optimizers.Nadam)
RMSprop = _ready_made(keras.optimizers.RMSprop)
SGD = _ready_made(keras.optimizers.SGD)


for _name in ("Lamb", "Muon", "ScheduleFreeAdamW"):  # later versions of Keras 3 have these
    if hasattr(keras.optimizers, _name):
        globals()[_name] = _ready_made(getattr(keras.optimizers, _name))
        __all__ += [_name]
