"""One optimizer step of a Keras model in traced functions, none of which knows the world.

`micro` computes what a micro-batch contributes and changes nothing; `apply` changes model and optimizer, once all
contributions of all workers have been summed. Between the two stands the collective, outside any graph. So each function
is traced once, however often the world changes, and a step that is torn leaves the model as it was.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.variables import OtherVariables

Sums = list[tf.Tensor]
LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch's place in its step."""

    weight: float  # its samples, as a part of the global batch
    lead: bool  # the step's very first: number 0 of rank 0
    seed: int  # of its random draws, 32 bits
    count: int  # of the micro-batch within the worker's step

    def to_tensors(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        draw = np.array([self.seed, self.count << 32], np.int64)
        return tf.constant(self.weight, tf.float64), tf.constant(self.lead), tf.constant(draw)


class TrainStep:
    """Model, loss and optimizer as the functions of which a step is made."""

    def __init__(self, model: Any, loss: LossFunction, optimizer: Any) -> None:
        """``loss(labels, predictions)``: the mean over the micro-batch, or one value per sample, which is meaned.

        Builds the optimizer.

        Raises:
            UserError: the model is not built, or is not one of Keras.
        """
        _check(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.traces: Counter[str] = Counter()
        self._loss = loss
        self._trainable = list(model.trainable_variables)
        self._others = OtherVariables(model.non_trainable_variables)
        if not optimizer.built:
            optimizer.build(self._trainable)
        self._training = {"training": True} if _takes_training(model) else {}
        dtypes = (*(str(variable.dtype) for variable in self._trainable), *self._others.dtypes)
        self.dtype = "float64" if "float64" in dtypes else "float32"  # of all sums: wide enough for each
        self._shapes = [*(tuple(variable.shape) for variable in self._trainable), *self._others.shapes, ()]
        self._micro = tf.function(self._trace_micro, reduce_retracing=True, autograph=False)
        self._add = tf.function(self._trace_add, autograph=False)
        self._apply = tf.function(self._trace_apply, autograph=False)

    # -- what a step does --

    def micro(self, inputs: Any, labels: Any, part: Part) -> Sums:
        """What a micro-batch adds to the sums of its step; the last of them is its part of the mean loss."""
        arguments = (inputs, labels, *part.to_tensors())
        if not self.traces["micro"]:
            self._micro.get_concrete_function(*any_batch(inputs, labels), *arguments[2:])
        return list(self._micro(*arguments))

    def add(self, sums: Sums, more: Sums) -> Sums:
        return list(self._add(sums, more))

    def zeros(self) -> Sums:
        """The sums of a worker that has no micro-batch in this step."""
        return [tf.zeros(shape, self.dtype) for shape in self._shapes]

    def apply(self, sums: Sums) -> None:
        """Update model and optimizer by the sums over all micro-batches of all workers."""
        self._apply(sums[:-1])

    def warm_up(self, inputs: Any, labels: Any) -> None:
        """Trace and run everything once; model and optimizer are afterwards as before.

        Raises:
            Exception: whatever the model or the loss raises on this micro-batch.
        """
        variables = [*self.model.variables, *self.optimizer.variables]
        before = [variable.numpy() for variable in variables]
        sums = self.micro(inputs, labels, Part(weight=1.0, lead=True, seed=0, count=0))
        self.apply(self.add(sums, self.zeros()))
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    # -- traced --

    def _trace_micro(self, inputs: Any, labels: Any, weight: tf.Tensor, lead: tf.Tensor, draw: tf.Tensor) -> Sums:
        self.traces["micro"] += 1
        trainable = [tf.convert_to_tensor(variable.value) for variable in self._trainable]
        others = self._others.values(draw)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            loss, moved = self._forward(trainable, others, inputs, labels)
            part = loss * tf.cast(weight, loss.dtype)
            scaled = self.optimizer.scale_loss(part)
        gradients = tape.gradient(scaled, trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        sums = [*dense, *self._others.moves(others, moved, weight, lead), part]
        return [tf.cast(each, self.dtype) for each in sums]

    def _forward(self, trainable: Sums, others: Sums, inputs: Any, labels: Any) -> tuple[tf.Tensor, Sums]:
        """The mean loss with these values of the variables, and what the others become."""
        outputs, moved, extra = self.model.stateless_call(
            trainable, others, inputs, return_losses=True, **self._training
        )
        loss = tf.reduce_mean(self._loss(labels, keras.tree.map_structure(widen, outputs)))
        for term in extra:  # of regularizers and add_loss
            loss += tf.cast(term, loss.dtype)
        return loss, moved

    def _trace_add(self, sums: Sums, more: Sums) -> Sums:
        self.traces["add"] += 1
        return [a + b for a, b in zip(sums, more, strict=True)]

    def _trace_apply(self, sums: Sums) -> None:
        self.traces["apply"] += 1
        count = len(self._trainable)
        self._others.assign(sums[count:])
        gradients = [tf.cast(each, v.dtype) for each, v in zip(sums[:count], self._trainable, strict=True)]
        self.optimizer.apply(gradients, self._trainable)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UserError(f"the model is a {type(model).__name__}; expected a keras.Model")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(f"the optimizer is a {type(optimizer).__name__}; expected a keras.optimizers.Optimizer")
    if not model.built:
        raise UserError(
            f"the model {model.name} is not built, so it has no weights yet: give it a keras.Input, or call it once on a batch"
        )


def _takes_training(model: Any) -> bool:
    parameters = inspect.signature(model.call).parameters.values()
    return any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)


def widen(output: Any) -> Any:
    """As Keras does before a loss: in half precision a scaled loss would overflow."""
    half = getattr(output, "dtype", None) in (tf.float16, tf.bfloat16)
    return tf.cast(output, tf.float32) if half else output


def any_batch(*samples: Any) -> tuple[Any, ...]:
    """The signature of these tensors with any number of samples."""
    specs: tuple[Any, ...] = keras.tree.map_structure(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), samples
    )
    return specs
