"""The Keras twin of `digits.cnn_torch`: at least 97 % on the held-out digits after 10 epochs.

    elasticdl train --model_zoo model_zoo --model_def digits.cnn_keras \
        --num_workers 2-4 --global_batch_size 256 --max_worker_batch_size 64 --num_epochs 10

``--model_params "dropout=0.0"`` leaves nothing random in the forward pass.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from elasticdl.data import Arrays

from .data import read_split


def custom_model(dropout: float = 0.2) -> keras.Model:
    images = keras.Input((8, 8, 1), name="image")
    hidden = _convolution(_convolution(images, 16), 32)
    hidden = _convolution(layers.MaxPooling2D(2)(hidden), 64)
    hidden = layers.Dropout(dropout)(layers.Flatten()(hidden))
    return keras.Model(images, layers.Dense(10)(hidden), name="digits")


def loss(labels: Any, predictions: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.004)


def dataset(mode: str, path: str) -> Arrays:
    """Samples are an 8x8x1 float image and a label 0..9; 1,437 for training, 360 for evaluation.

    Raises:
        ValueError: `mode` is unknown, or a path is given although the digits have none.
    """
    images, labels = read_split(mode, path)
    return Arrays(images[..., None], labels)


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def _convolution(inputs: Any, features: int) -> Any:
    # No bias: the batch norm that follows takes the mean away. Its momentum is that of PyTorch, as epochs are short.
    convolved = layers.Conv2D(features, 3, padding="same", use_bias=False)(inputs)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(convolved))
