"""What Horovod 0.28 can't do with Keras 3, although it needs little: its gradient tape and ``TensorFlowKerasState``.

In Keras 3 variables wrap those of TensorFlow, ``optimizer.variables`` is a list and no function, and an optimizer has
slots only when it is built, which on newcomers is later than the first synchronisation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


def mend_gradient_tape(module: Any) -> None:
    """``module``: ``horovod.tensorflow``. ``DistributedGradientTape`` copies this class."""
    tape_class = module._DistributedGradientTape
    real_gradient = tape_class.gradient

    @functools.wraps(real_gradient)
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return real_gradient(tape, target, _of_tensorflow(sources), *args, **kwargs)

    tape_class.gradient = gradient


def mend_keras_state(module: Any) -> None:
    """``module``: ``horovod.tensorflow.elastic``. States on older Keras are left as they are."""
    state_class = module.TensorFlowKerasState
    real_broadcast, real_save, real_load = module._broadcast_model, state_class._save_model, state_class._load_model

    def broadcast_model(model: Any, optimizer: Any, backend: Any) -> None:
        if not _is_keras_3(optimizer):
            real_broadcast(model, optimizer, backend)
            return
        module.broadcast_variables(_variables(model, optimizer), root_rank=0)

    def save_model(state: Any) -> None:
        if not _is_keras_3(state.optimizer):
            real_save(state)
            return
        variables = _variables(state.model, state.optimizer)
        state._saved_model_state = [module.tf.identity(variable) for variable in variables]

    def load_model(state: Any) -> None:
        if not _is_keras_3(state.optimizer):
            real_load(state)
            return
        for variable, saved in zip(_variables(state.model, state.optimizer), state._saved_model_state, strict=True):
            variable.assign(saved)

    module._broadcast_model = broadcast_model
    state_class._save_model, state_class._load_model = save_model, load_model


def _is_keras_3(optimizer: Any) -> bool:
    return not callable(optimizer.variables)


def _variables(model: Any, optimizer: Any) -> list[Any]:
    """TensorFlow's variables of both, the seeds of random layers left out: workers need not draw the same."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*_of_tensorflow(model.weights), *_of_tensorflow(optimizer.variables)]


def _of_tensorflow(variables: Iterable[Any]) -> list[Any]:
    return [_unwrapped(variable) for variable in variables]


def _unwrapped(variable: Any) -> Any:
    """What a variable of Keras wraps: its ``value``, which with TensorFlow's own is a function and with tensors missing."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value
