"""A forward pass of a micro-batch, while it is traced: it changes nothing.

What the model and the loss set is noted, and what else they read is found (`ForwardScope`). Where a mask leaves elements out,
it is found what the mean loss was divided by (`Share`): Keras divides the loss of a batch by the number of its elements that
are not masked. So a micro-batch contributes its loss times the share of its elements that are left, and what is summed is
divided by the share over the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.layout import Sums
from elasticdl.tensorflow import keras, tf

# How the names of those of TensorFlow's operations begin that change a variable.
CHANGING = ("Assign", "ResourceScatter", "ResourceApply", "ResourceStridedSliceAssign")

REMEDY = "keep it as a weight of a layer, by add_weight(), or as a variable that a callback sets"


class ForwardScope(keras.StatelessScope):  # type: ignore[misc]
    """Within, variables have the given values, and new ones go nowhere but here.

    A trainable variable that is set in the pass, as SpectralNormalization does, has several values in it. Its gradient is
    the sum over them: no gradient goes through an assignment, as with Keras.
    """

    def __init__(
        self, trainable: Sequence[Any], values: Sequence[tuple[Any, Any]], tape: tf.GradientTape | None
    ) -> None:
        """``values``: pairs of all variables that may be set, those of ``trainable`` first, and what they begin with."""
        super().__init__(list(values), collect_losses=True)
        self._tape = tape
        self._known = {id(variable) for variable, _ in values}
        self._index = {id(variable): index for index, variable in enumerate(trainable)}
        self._had: list[Sums] = [[value] for _, value in values[: len(trainable)]]
        self.foreign: list[Any] = []  # variables of others that were set

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        index = self._index.get(id(variable))
        if index is not None:
            value = tf.stop_gradient(value)
            if self._tape is not None:
                self._tape.watch(value)
            self._had[index].append(value)
        elif id(variable) not in self._known:
            self.foreign.append(variable)
        super().add_update((variable, value))

    def gradients(self, loss: tf.Tensor) -> list[tf.Tensor | None]:
        """Of the trainable variables; None of one that the loss does not depend on, which an optimizer leaves alone."""
        assert self._tape is not None
        found = ([each for each in one if each is not None] for one in self._tape.gradient(loss, self._had))
        return [tf.add_n([tf.convert_to_tensor(each) for each in one]) if one else None for one in found]

    @property
    def assigned(self) -> dict[int, tf.Tensor]:
        """The last values of the trainable variables that were set, by the variable's number."""
        return {index: had[-1] for index, had in enumerate(self._had) if len(had) > 1}


def captured(graph: Any, own: Iterable[Any]) -> list[Any]:
    """TensorFlow's variables that a function reads, without the ``own`` ones of Keras; in the order of its operations.

    ``graph``: of the function, once it has been traced.
    """
    known = {id(variable.value) for variable in own}
    place = {id(tensor): number for number, tensor in enumerate(graph.external_captures)}
    found = [variable for variable in graph.variables if id(variable) not in known]
    return sorted(found, key=lambda variable: (place.get(id(variable.handle), len(place)), variable.name))


def refuse_changes(graph: Any, own: Iterable[Any]) -> None:
    """``graph``: of a forward pass, at the end of its tracing.

    Raises:
        UserError: it changes a variable of TensorFlow's; those of Keras are only set in a `ForwardScope`.
    """
    known = {id(variable.value.handle) for variable in own}
    resources = [tensor for tensor in graph.external_captures if tensor.dtype == tf.resource]
    foreign = {id(tensor) for tensor in resources} - known
    if foreign and _changes_any(graph.as_graph_def()):
        watched = getattr(graph, "_watched_variables", ())  # in no public place yet
        names = sorted(variable.name for variable in watched if id(variable.handle) in foreign)
        raise UserError(
            f"the model or the loss changes {', '.join(names) or 'a variable'} when it is called, which each worker does for "
            f"itself: {REMEDY}"
        )


def _changes_any(definition: Any) -> bool:
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.startswith(CHANGING) for node in nodes)


def refuse_foreign(variables: Sequence[Any], metrics: Iterable[Any]) -> None:
    """``variables``: that were set in a pass, and are not the model's. What ``metrics`` of layers count is not needed.

    Raises:
        UserError: there are others.
    """
    counted = {id(variable) for metric in metrics for variable in metric.variables}
    for variable in variables:
        if id(variable) not in counted:
            raise UserError(f"the model or the loss sets {variable.path}, which is no weight of the model: {REMEDY}")


# -- masks --

LEAST = 1e-12  # share, of a batch of which nothing is left: regularizers count there, too


@dataclass(frozen=True, slots=True)
class Share:
    """``left``: of a batch's elements, those that are not masked; None if nothing is masked. ``problem``: why it can't be
    divided, if so."""

    left: Any = None
    problem: str = ""


NOTHING_MASKED = Share()


def share_of(outputs: Any, loss: tf.Tensor, *, more_losses: bool) -> Share:
    """While a function is traced. ``loss``: of ``outputs``; ``more_losses``: others, of the batch, were added to it."""
    leaves = keras.tree.flatten(outputs)
    masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
    there = [mask for mask in masks if mask is not None]
    if not there or not reads(loss, there, leaves):
        return NOTHING_MASKED
    if any(mask is not masks[0] for mask in masks):
        return Share(problem="its outputs have different masks, and each loss is a mean over what its mask leaves")
    if more_losses:
        return Share(
            problem="a mask leaves elements out of the loss, but not of what add_loss or a regularizer of outputs adds"
        )
    return Share(tf.maximum(tf.reduce_mean(tf.cast(there[0], tf.float32)), LEAST))


def has_losses_of_batches(model: keras.Model) -> bool:
    """Within the scope of a call: whether it had losses besides those of regularized weights."""
    return len(model.losses) > sum(variable.regularizer is not None for variable in model.trainable_variables)


def is_scalar(loss: Any, labels: Any, outputs: Any) -> bool:
    """Whether a loss of the user's own gives one number, which Keras divides by nothing."""
    function = loss.call if isinstance(loss, keras.losses.Loss) else loss
    if not callable(function) or str(getattr(function, "__module__", "")).startswith("keras."):
        return False
    return len(tf.convert_to_tensor(function(labels, outputs)).shape) == 0


def reads(value: tf.Tensor, wanted: Sequence[tf.Tensor], ends: Sequence[tf.Tensor] = ()) -> bool:
    """Whether a tensor was computed from one of the ``wanted`` other than by way of the ``ends``."""
    targets, passed, open_ = {id(each) for each in wanted}, {id(each) for each in ends}, [value]
    while open_:
        tensor = open_.pop()
        if id(tensor) in targets:
            return True
        if id(tensor) not in passed:
            passed.add(id(tensor))
            open_ += tensor.op.inputs
    return False
