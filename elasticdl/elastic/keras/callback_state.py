"""What a Keras callback keeps of itself: what of it travels to other workers and into checkpoints, and how.

See `elasticdl.elastic.training.attributes`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.training import attributes, plain_data
from elasticdl.elastic.training.attributes import Content, Kinds
from elasticdl.tensorflow import keras, tf

KERAS_KNOWN = "3.15"
GREATEST_IS_BEST = ("acc", "auc", "fmeasure")  # in a metric's name
FOREIGN = ("model", "_model", "params")  # attributes that Keras itself sets

Attributes = dict[str, Any]


def take(callback: Any, *, copy: bool = True) -> Attributes:
    """Everything of a callback that travels."""
    return attributes.take(callback, KINDS, FOREIGN, copy=copy)


def changed(callback: Any, first: Mapping[str, Any]) -> Attributes:
    """What has changed since `take` gave ``first``; by reference."""
    present = take(callback, copy=False)
    return {
        name: value
        for name, value in present.items()
        if name not in first or plain_data.checksum(value) != plain_data.checksum(first[name])
    }


def put(callback: Any, kept: Mapping[str, Any]) -> None:
    """Let a callback have what `take` or `changed` gave, from another worker perhaps."""
    for path, value in kept.items():
        if not attributes.put(callback, path, value, KINDS):
            logging.getLogger(__name__).warning(
                "%s.%s of this worker has no content that could be set to that of the others'",
                type(callback).__name__,
                path.removeprefix(attributes.CONTENT),
            )


def left_behind(callback: Any) -> list[str]:
    """Attributes that do not travel, and which some user may count on, each with the kind of what it holds."""
    if type(callback).__module__.partition(".")[0] == "keras":
        return []
    found = attributes.left_behind(attributes.spots(callback, KINDS, FOREIGN), KINDS)
    return [f"{spot.path} ({type(spot.value).__name__})" for spot in found]


def held(callback: Any) -> list[Any]:
    """Callbacks that are kept in one."""
    entered: list[tuple[Any, Any, Any]] = []
    for _ in attributes.spots(callback, KINDS, FOREIGN, entered=entered):
        """They are found on the way."""
    return [value for _, _, value in entered if isinstance(value, keras.callbacks.Callback)]


def choose_direction(callback: keras.callbacks.Callback) -> None:
    """Whether the least or the greatest value of what is monitored is the best.

    Keras decides it at the end of the first epoch, and changes ``min_delta`` along with it: too late for a newcomer. It
    knows only metrics that the model was compiled with; for others the name tells, as it did in Keras 2. This is the
    only thing here that Keras has no public function for.
    """
    if getattr(callback, "monitor_op", callback) is not None or callback.model is None:
        return
    choose = getattr(callback, "_set_monitor_op", None)
    if choose is None:
        raise UserError(
            f"{type(callback).__name__} of Keras {keras.__version__} can't be used: elasticdl was made for Keras {KERAS_KNOWN}"
        )
    try:
        choose()
    except ValueError:
        callback.mode = "max" if any(sign in callback.monitor for sign in GREATEST_IS_BEST) else "min"
        choose()


def _content_of(value: Any) -> Content | None:
    match value:
        case tf.Variable() | keras.Variable():
            return Content(_array, lambda variable, array: variable.assign(array))
        case keras.metrics.Metric():
            return Content(lambda metric: [_array(each) for each in metric.variables], _put_variables)
    return None


def _array(variable: Any) -> Any:
    return np.asarray(variable.numpy())


def _put_variables(metric: Any, arrays: list[Any]) -> None:
    for variable, array in zip(metric.variables, arrays, strict=True):
        variable.assign(array)


KINDS = Kinds(
    _content_of,
    (
        *(keras.layers.Layer, keras.optimizers.Optimizer, keras.losses.Loss),
        *(keras.utils.PyDataset, tf.data.Dataset, tf.summary.SummaryWriter),
    ),
    holders=(keras.callbacks.Callback,),
    foreign=FOREIGN,
)
