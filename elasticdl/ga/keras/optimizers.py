"""Keras's optimizers, made to accumulate gradients.

    optimizer = optimizers.Optimizer(keras.optimizers.Adam(), steps=STEPS)
    optimizer = optimizers.Adam(STEPS)

There is a ready-made one for each that Keras has. They take ``steps`` first or by name, then what Keras's class takes.
Optimizers that are made of others (LossScaleOptimizer, MultiOptimizer) are given to `Optimizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from elasticdl.ga.keras.optimizer import Optimizer
from elasticdl.ga.steps import ReadyMade, ready_made


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


_MADE_OF_OTHERS = {"LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
_made = ready_made(keras.optimizers, keras.optimizers.Optimizer, _MADE_OF_OTHERS, _Saved, place=__name__)
for _each in _made.values():
    keras.saving.register_keras_serializable(package="elasticdl")(_each)
globals().update(_made)
__all__ = ["Optimizer", *_made]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Optimizer]: ...
