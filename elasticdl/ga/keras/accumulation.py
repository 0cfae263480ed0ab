"""The gradients of the micro-batches seen so far: their weighted sum, in variables, so that a traced step can add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.tensorflow import keras, tf

HALF_PRECISION = ("float16", "bfloat16")


class Accumulation:
    """What has been taken in since the last optimizer step, for the variables that the optimizer was built with.

    A variable that got no gradient in some of the micro-batches counts as having got zero there. One that never got any
    is left alone by the optimizer, as it would be after one big batch.
    """

    def __init__(self, variables: Iterable[Any], count: Any, add_variable: Callable[..., Any]) -> None:
        """``count``: the variable that counts micro-batches. ``add_variable``: of the optimizer, that saves the state.

        Raises:
            UserError: a variable is a scale of float8.
        """
        self.variables: list[Any] = list(variables)
        for variable in self.variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise UserError(
                    f"{variable.path} is a scale of float8, whose gradients can't be summed: give another dtype policy"
                )
        self.count = count
        self.weight = add_variable(shape=(), dtype="float32", name="accumulated_weight")
        self._sums = [_add_sum(variable, add_variable) for variable in self.variables]
        self._index = {id(variable): index for index, variable in enumerate(self.variables)}
        self._with_gradient: set[int] = set()
        self._left_out: set[int] = set()  # of an update that was traced, and that goes on leaving them out

    def take(self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any) -> None:
        """Add the gradients of one micro-batch; those that are None count as zero.

        Raises:
            UserError: there are none at all, or they are of variables that the optimizer does not know.
        """
        having = [
            (self._index_of(variable), gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        if not having:
            raise UserError("no gradient was given for any variable: is the loss computed from the model's variables?")
        self._note({index for index, _ in having})
        for index, gradient in having:
            _add(self._sums[index], gradient, weight)
        self.weight.assign_add(keras.ops.cast(weight, "float32"))
        self.count.assign_add(1)

    def means(self) -> list[Any]:
        """For each variable its mean gradient; None for those that never got one."""
        having = self._with_gradient or set(range(len(self.variables)))  # nothing is known of what a file brought
        if not tf.executing_eagerly():
            self._left_out |= set(range(len(self.variables))) - having
        return [
            self._mean(variable, total) if index in having else None
            for index, (variable, total) in enumerate(zip(self.variables, self._sums, strict=True))
        ]

    def clear(self) -> None:
        for variable in (self.count, self.weight, *self._sums):
            variable.assign(keras.ops.zeros(variable.shape, dtype=variable.dtype))

    def _mean(self, variable: Any, total: Any) -> Any:
        return keras.ops.cast(total / keras.ops.cast(self.weight, total.dtype), variable.dtype)

    def _index_of(self, variable: Any) -> int:
        try:
            return self._index[id(variable)]
        except KeyError:
            name = getattr(variable, "path", variable.name)
            raise ArgumentError(f"the optimizer was not built with the variable {name!r}: make a new one") from None

    def _note(self, having: set[int]) -> None:
        for index in having & self._left_out:
            raise UserError(
                f"{self.variables[index].name!r} had no gradient when the training step was traced, and now has one: "
                "make a new optimizer"
            )
        self._with_gradient |= having


def _add_sum(variable: Any, add_variable: Callable[..., Any]) -> Any:
    # Half precision would lose what is small beside the sum; one big batch sums in single precision, too.
    dtype = keras.backend.standardize_dtype(variable.dtype)
    name = str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")
    dtype = "float32" if dtype in HALF_PRECISION else dtype
    return add_variable(shape=variable.shape, dtype=dtype, name=f"{name}_accumulated")


def _add(total: Any, gradient: Any, weight: Any) -> None:
    weight = keras.ops.cast(weight, total.dtype)
    if isinstance(gradient, tf.IndexedSlices):  # of an embedding: only the rows that were looked up
        rows = keras.ops.cast(gradient.values, total.dtype) * weight
        total.value.scatter_add(tf.IndexedSlices(rows, gradient.indices, gradient.dense_shape))
    else:
        total.assign_add(keras.ops.cast(gradient, total.dtype) * weight)
