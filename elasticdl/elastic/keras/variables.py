"""The pieces of a training state of Keras'."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.keras.keras_job import ElasticContext
from elasticdl.elastic.keras.step import SEED_NAME
from elasticdl.elastic.training.fingerprint import Array, array_marks, as_array
from elasticdl.elastic.training.pieces import Local, Settings, Tensors, Trained
from elasticdl.tensorflow import keras, tf


class Variables(Trained):
    """Some variables, dumped as NumPy arrays in their order."""

    def __init__(self, name: str, variables: Callable[[], Sequence[Any]]) -> None:
        self.name = name
        self._variables = variables

    def dump(self) -> list[Array]:
        return [np.asarray(variable.numpy()) for variable in self._variables()]

    def sent(self) -> list[tf.Tensor]:
        return [_read(variable) for variable in self._variables()]

    def load(self, dumped: Sequence[Any]) -> None:
        """Raises:
        UserError: they are of another model or optimizer.
        """
        if problem := self.misfit(dumped):
            raise UserError(problem)
        for variable, value in zip(self._variables(), dumped, strict=True):
            variable.assign(value)

    def missing(self) -> None:
        self.load([])

    def misfit(self, dumped: Sequence[Any]) -> str:
        variables = self._variables()
        if len(variables) != len(dumped):
            counts = f"it has {len(dumped)} variables, and this one has {len(variables)}"
            return f"the state is of another {self.name}: {counts}"
        for variable, value in zip(variables, dumped, strict=True):
            if tuple(variable.shape) != tuple(value.shape):
                path = getattr(variable, "path", variable.name)
                shapes = f"{path} has shape {tuple(variable.shape)}, and there it has {tuple(value.shape)}"
                return f"the state is of another {self.name}: {shapes}"
        return ""

    def compared(self) -> Mapping[str, Any]:
        every = [(f"{self.name}.{_path(each)}", each) for each in self._variables()]
        # The learning rate is a setting. The seed of dropout's draws is no part of the state: each worker gives its micro-batches their own.
        shared = [
            (name, each)
            for name, each in every
            if not name.endswith(SEED_NAME) and not (self.name == "optimizer" and name.endswith("/learning_rate"))
        ]
        # Keras numbers layers by how many a process has made, which may be more on one worker.
        return {f"{re.sub('_[0-9]+', '', name)}#{number}": each for number, (name, each) in enumerate(shared)}


class RateSetting(Settings):
    """The learning rate of an optimizer; None if it follows from the optimizer's own schedule."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer

    def dump(self) -> float | None:
        return self.rate if isinstance(self._optimizer.learning_rate, keras.Variable) else None

    def load(self, dumped: float | None) -> None:
        if dumped is not None:
            self.set_rate(dumped)

    def told(self) -> Mapping[str, Any]:
        return {"optimizer.learning_rate": self.dump()}

    @property
    def rate(self) -> float:
        """Of the next step, unless the rules (`follow`) or the optimizer's own schedule change it."""
        rate = self._optimizer.learning_rate
        held = rate.value if isinstance(rate, keras.Variable) else None
        if not isinstance(held, tf.Variable):
            return float(rate)
        # It is read several times in a step, and float() takes four times as long.
        return float(tf.raw_ops.ReadVariableOp(resource=held.handle, dtype=held.dtype).numpy())

    def own_rate(self) -> float:
        return self.rate

    def set_rate(self, rate: float) -> None:
        if rate != self.rate:  # the traced functions read it from its variable
            self._optimizer.learning_rate = rate


class BegunEpoch(Local):
    """The last epoch that callbacks were told of. Before another state is loaded, they are told of the one that it is in."""

    name = "begun_epoch"
    travels = True

    def __init__(self) -> None:
        self.epoch = -1
        self.before_load: Callable[[int], None] = lambda epoch: None

    def dump(self) -> int:
        return self.epoch

    def load(self, dumped: int) -> None:
        self.before_load(dumped)

    def missing(self) -> None:
        self.before_load(-1)


class CallbacksParts(Local):
    """What callbacks keep, to be compared. It travels by itself."""

    name = "callbacks"

    def __init__(self) -> None:
        self.compare: Callable[[], Mapping[str, Any]] = dict

    def compared(self) -> Mapping[str, Any]:
        return self.compare()


def tensors_of(job: ElasticContext) -> Tensors:
    return Tensors(
        lambda arrays: array_marks([_host_array(each) for each in arrays]),
        _host_array,
        lambda dumped, **to_all: broadcast_state(dumped, job.collective, **to_all),
        pickle.dump,
        pickle.load,
    )


def _host_array(value: Any) -> Array:
    if isinstance(value, keras.Variable | tf.Variable | tf.Tensor):
        return np.asarray(_read(value).numpy())
    return value if isinstance(value, np.ndarray) else as_array(value)


def _path(variable: Any) -> str:
    return str(variable.name if isinstance(variable, tf.Variable) else variable.path)


def _read(variable: Any) -> tf.Tensor:
    """Of Keras, or of TensorFlow."""
    return tf.convert_to_tensor(variable.value if isinstance(variable, keras.Variable) else variable)
