"""What a callback keeps of itself: what of it travels to other workers and into checkpoints, and how.

Plain data travel as what they are. Objects whose content can be taken and put (variables, metrics, random streams) stay the
objects that they are here, with the content of rank 0's. Of the rest, what is the user's is named once.
"""

from __future__ import annotations

import io
import logging
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from types import ModuleType
from typing import Any

import numpy as np

from elasticdl.elastic.keras import plain_data
from elasticdl.tensorflow import keras, tf

FOREIGN = ("model", "_model", "params")  # attributes that Keras itself sets
CONTENT = "="  # before the name of an attribute whose content was taken: no attribute has such a name
OF_THE_PROCESS = (
    *(ModuleType, type, io.IOBase, logging.Logger, threading.Thread, threading.Event, type(threading.Lock())),
    *(keras.layers.Layer, keras.optimizers.Optimizer, keras.losses.Loss, keras.callbacks.Callback),
    *(keras.utils.PyDataset, tf.data.Dataset, tf.summary.SummaryWriter),
)

Attributes = dict[str, Any]
Content = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]  # how it is taken, and put


def take(callback: Any, *, copy: bool = True) -> Attributes:
    """Everything of a callback that travels."""
    found: Attributes = {}
    for name, value in _own(callback):
        if plain_data.is_plain(value):
            found[name] = deepcopy(value) if copy else value
        elif content := _content(value):
            found[CONTENT + name] = content[0](value)
        elif (inner := _with_factory(value)) is not None:
            found[name] = deepcopy(inner) if copy else inner
    return found


def changed(callback: Any, first: Mapping[str, Any]) -> Attributes:
    """What has changed since `take` gave ``first``; by reference."""
    present = take(callback, copy=False)
    return {
        name: value
        for name, value in present.items()
        if name not in first or not plain_data.is_same(value, first[name])
    }


def put(callback: Any, kept: Mapping[str, Any]) -> None:
    """Let a callback have what `take` or `changed` gave, from another worker perhaps."""
    for name, value in kept.items():
        present = vars(callback).get(name.removeprefix(CONTENT))
        if name.startswith(CONTENT):
            content = _content(present)
            if content is None:
                logging.getLogger(__name__).warning(
                    "%s.%s of this worker has no content that could be set to that of the others'",
                    type(callback).__name__,
                    name.removeprefix(CONTENT),
                )
            else:
                content[1](present, value)
        elif type(value) is defaultdict and type(present) is defaultdict:
            vars(callback)[name] = defaultdict(present.default_factory, value)
        else:
            vars(callback)[name] = value


def left_behind(callback: Any) -> list[str]:
    """Attributes that do not travel, and which some user may count on, each with the kind of what it holds."""
    if type(callback).__module__.partition(".")[0] == "keras":
        return []
    travels = {name.removeprefix(CONTENT) for name in take(callback, copy=False)}
    return [
        f"{name} ({type(value).__name__})"
        for name, value in _own(callback)
        if name not in travels and not callable(value) and not isinstance(value, OF_THE_PROCESS)
    ]


def _own(callback: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(callback).items() if name not in FOREIGN)


def _with_factory(value: Any) -> Any:
    """A defaultdict whose factory is a function: another worker's has its own."""
    if type(value) is not defaultdict:
        return None
    bare = defaultdict(None, value)
    return bare if plain_data.is_plain(bare) else None


def _content(value: Any) -> Content | None:
    match value:
        case tf.Variable() | keras.Variable():
            return _array, lambda variable, array: variable.assign(array)
        case keras.metrics.Metric():
            return lambda metric: [_array(each) for each in metric.variables], _put_variables
        case np.random.Generator():
            return lambda stream: deepcopy(stream.bit_generator.state), _put_bits
        case np.random.RandomState():
            return lambda stream: stream.get_state(), lambda stream, state: stream.set_state(state)
        case random.Random():
            return lambda stream: stream.getstate(), lambda stream, state: stream.setstate(state)
    return None


def _array(variable: Any) -> Any:
    return np.asarray(variable.numpy())


def _put_variables(metric: Any, arrays: list[Any]) -> None:
    for variable, array in zip(metric.variables, arrays, strict=True):
        variable.assign(array)


def _put_bits(stream: np.random.Generator, state: Any) -> None:
    stream.bit_generator.state = state
