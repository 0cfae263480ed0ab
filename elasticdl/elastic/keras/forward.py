"""A forward pass in which nothing changes: what the model and the loss set is noted, and what else they read is found.

All of it is used while a function is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
