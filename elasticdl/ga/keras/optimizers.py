"""Keras's optimizers, made to accumulate gradients.

    optimizer = optimizers.Optimizer(keras.optimizers.Adam(), steps=STEPS)
    optimizer = optimizers.Adam(STEPS)

The ready-made ones take ``steps`` first or by name, then what Keras's class of that name takes. Optimizers that are made
of others (LossScaleOptimizer, MultiOptimizer) are given to `Optimizer`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import keras

from elasticdl.common.errors import ArgumentError
from elasticdl.ga.keras.optimizer import Optimizer
from elasticdl.ga.steps import checked_steps

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


class ReadyMade(Optimizer):
    """Makes the optimizer that it wraps."""

    wraps: ClassVar[type[keras.optimizers.Optimizer]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """``(steps, ...)`` or ``(..., steps=steps)``; the rest is as for Keras's class."""
        if "steps" not in kwargs:
            if not args:
                raise ArgumentError(f"{type(self).__name__}(steps, ...) needs steps")
            kwargs["steps"], args = args[0], args[1:]
        steps = checked_steps(kwargs.pop("steps"))
        super().__init__(self.wraps(*args, **kwargs), steps)

    def get_config(self) -> dict[str, Any]:
        return {**self.optimizer.get_config(), "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Optimizer:
        config = dict(config)
        steps = config.pop("steps")
        made = cls.__new__(cls)
        Optimizer.__init__(made, cls.wraps.from_config(config, custom_objects), steps)
        return made


_serializable = keras.saving.register_keras_serializable(package="elasticdl")


@_serializable
class Adadelta(ReadyMade):
    wraps = keras.optimizers.Adadelta


@_serializable
class Adafactor(ReadyMade):
    wraps = keras.optimizers.Adafactor


@_serializable
class Adagrad(ReadyMade):
    wraps = keras.optimizers.Adagrad


@_serializable
class Adam(ReadyMade):
    wraps = keras.optimizers.Adam


@_serializable
class Adamax(ReadyMade):
    wraps = keras.optimizers.Adamax


@_serializable
class AdamW(ReadyMade):
    wraps = keras.optimizers.AdamW


@_serializable
class Ftrl(ReadyMade):
    wraps = keras.optimizers.Ftrl


@_serializable
class Lion(ReadyMade):
    wraps = keras.optimizers.Lion


@_serializable
class Nadam(ReadyMade):
    wraps = keras.optimizers.Nadam


@_serializable
class RMSprop(ReadyMade):
    wraps = keras.optimizers.RMSprop


@_serializable
class SGD(ReadyMade):
    wraps = keras.optimizers.SGD


# Later versions of Keras 3 have these.
if hasattr(keras.optimizers, "Lamb"):

    @_serializable
    class Lamb(ReadyMade):
        wraps = keras.optimizers.Lamb

    __all__ += ["Lamb"]

if hasattr(keras.optimizers, "Muon"):

    @_serializable
    class Muon(ReadyMade):
        wraps = keras.optimizers.Muon

    __all__ += ["Muon"]

if hasattr(keras.optimizers, "ScheduleFreeAdamW"):

    @_serializable
    class ScheduleFreeAdamW(ReadyMade):
        wraps = keras.optimizers.ScheduleFreeAdamW

    __all__ += ["ScheduleFreeAdamW"]
