"""The models and the data for all that trains with Keras on TensorFlow: as `benchmarks.torch_models` for PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.models import CLASSES, LAYERS
from elasticdl.tensorflow import keras, tf


def use_one_thread() -> None:
    """Before TensorFlow computes anything."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def make_model(name: str) -> keras.Sequential:
    """Built, and always with the same initial weights."""
    keras.utils.set_random_seed(0)
    inputs, *hidden, outputs = LAYERS[name]
    layers = [keras.layers.Dense(units, "relu") for units in hidden]
    return keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(outputs)])


def make_optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def make_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_arrays(name: str, samples: int) -> tuple[Any, Any]:
    """Random inputs and labels in memory."""
    generator = np.random.default_rng(1)
    inputs = generator.standard_normal((samples, LAYERS[name][0]), np.float32)
    return inputs, generator.integers(0, CLASSES, samples)
