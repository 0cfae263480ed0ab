"""Keras's optimizers, made to accumulate gradients.

    optimizer = optimizers.Optimizer(keras.optimizers.Adam(), steps=STEPS)
    optimizer = optimizers.Adam(STEPS)

The ready-made ones take ``steps`` first or by name, then what Keras's class of that name takes. Optimizers that are made
of others (LossScaleOptimizer, MultiOptimizer) are given to `Optimizer`.
"""

from __future__ import annotations

from typing import Any

from elasticdl.ga.keras.optimizer import Optimizer
from elasticdl.ga.steps import ReadyMade, ready_made
from elasticdl.tensorflow import keras

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


class _Saved(ReadyMade, Optimizer):
    """Its configuration is that of the optimizer that it wraps, and ``steps``."""

    def get_config(self) -> dict[str, Any]:
        return {**self.optimizer.get_config(), "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Optimizer:
        config = dict(config)
        steps = config.pop("steps")
        made = cls.__new__(cls)
        Optimizer.__init__(made, cls.wraps.from_config(config, custom_objects), steps)
        return made


def _ready_made(wraps: type[keras.optimizers.Optimizer]) -> type[Optimizer]:
    made = ready_made(wraps, _Saved, place=__name__)
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


# Later versions of Keras 3 have these.
if hasattr(keras.optimizers, "Lamb"):
    Lamb = _ready_made(keras.optimizers.Lamb)
    __all__ += ["Lamb"]
if hasattr(keras.optimizers, "Muon"):
    Muon = _ready_made(keras.optimizers.Muon)
    __all__ += ["Muon"]
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    ScheduleFreeAdamW = _ready_made(keras.optimizers.ScheduleFreeAdamW)
    __all__ += ["ScheduleFreeAdamW"]
