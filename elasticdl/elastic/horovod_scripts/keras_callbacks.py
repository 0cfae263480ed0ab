"""What Horovod 0.28's callbacks for Keras need of Keras 3, which has it no longer: ``keras.backend`` with its functions,
variables that TensorFlow takes, and ``optimizer.lr``."""

from __future__ import annotations

import functools
import sys
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.horovod_scripts.mends import restore_lr, tensorflow_variables


class Backend:
    """The functions of Keras 2's ``keras.backend`` that the callbacks call."""

    def __init__(self, tensorflow: Any) -> None:
        self._tensorflow = tensorflow

    def constant(self, value: Any, name: str | None = None) -> Any:
        return self._tensorflow.constant(value, name=name)

    @staticmethod
    def get_value(variable: Any) -> float:
        return float(variable)

    @staticmethod
    def set_value(variable: Any, value: float) -> None:
        if hasattr(variable, "assign"):  # else it is a number, which `_refuse_momentum` has seen to be 0
            variable.assign(value)


def mend_callbacks(module: Any) -> None:
    """``module``: ``horovod._keras.callbacks``. Callbacks of Keras 2 are left as they are."""
    broadcast, average = module.BroadcastGlobalVariablesCallbackImpl, module.MetricAverageCallbackImpl
    schedule = module.LearningRateScheduleCallbackImpl
    for kind in (broadcast, average, schedule):
        _give_backend(kind, module.tf)
    real_broadcast, real_begin = broadcast.on_batch_end, schedule.on_train_begin

    @functools.wraps(real_broadcast)
    def on_batch_end(callback: Any, batch: int, logs: Any = None) -> None:
        if not isinstance(callback.backend, Backend):
            real_broadcast(callback, batch, logs)
        elif not callback.broadcast_done:
            variables = tensorflow_variables(callback.model, callback.model.optimizer)
            sent = [each for each in variables if each.ref() not in callback._local_vars]
            module.hvd.broadcast_variables(sent, root_rank=callback.root_rank)
            callback.broadcast_done = True

    @functools.wraps(real_begin)
    def on_train_begin(callback: Any, logs: Any = None) -> None:
        if isinstance(callback.backend, Backend):
            _refuse_momentum(callback)
        real_begin(callback, logs)

    broadcast.on_batch_end, schedule.on_train_begin = on_batch_end, on_train_begin


def _give_backend(kind: Any, tensorflow: Any) -> None:
    real_init = kind.__init__

    @functools.wraps(real_init)
    def init(callback: Any, backend: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(backend, "get_value"):
            backend = Backend(tensorflow)
            restore_lr(sys.modules["keras"])
        real_init(callback, backend, *args, **kwargs)

    kind.__init__ = init


def _refuse_momentum(callback: Any) -> None:
    momentum = getattr(callback.model.optimizer, "momentum", 0)
    if callback.momentum_correction and momentum:
        raise UserError(
            f"{type(callback).__name__}: Keras 3 can't change an optimizer's momentum ({momentum}) while it trains: give the "
            "callback momentum_correction=False"
        )
