"""The Keras twin of `cifar10.resnet20_torch`: ResNet20 (He et al. 2015, section 4.2), 0.27 M parameters.

    elasticdl train --model_zoo model_zoo --model_def cifar10.resnet20_keras --minibatch_size 128 --num_workers 2-4 \
        --num_epochs 90 --training_data cifar-10-python.tar.gz --validation_data cifar-10-python.tar.gz

The learning rate follows the number of workers (see `callbacks`), so the batch has to as well: use
``--minibatch_size``, not ``--global_batch_size``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np
from keras import layers
from numpy.typing import NDArray

from elasticdl.data import Arrays

from .archive import open_split
from .recipe import DEVIATION, LEARNING_RATE, MEAN, PADDING, learning_rate


def custom_model() -> keras.Model:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]  # nine blocks from one width to the next
    images = keras.Input((32, 32, 3), name="image")
    hidden = layers.ReLU()(_normalised(_convolution(images, 16)))
    for channels, features in pairwise(widths):
        hidden = _block(hidden, channels, features)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)), name="resnet20")


def _block(inputs: Any, channels: int, features: int) -> Any:
    """Two convolutions around which the input is carried unchanged (option A: subsampled, new channels zero)."""
    stride, before = features // channels, (features - channels) // 2
    carried = inputs[:, ::stride, ::stride, :]
    carried = keras.ops.pad(carried, ((0, 0), (0, 0), (0, 0), (before, features - channels - before)))
    hidden = layers.ReLU()(_normalised(_convolution(inputs, features, stride)))
    return layers.ReLU()(layers.Add()([carried, _normalised(_convolution(hidden, features))]))


def _convolution(inputs: Any, features: int, stride: int = 1) -> Any:
    # Padded on both sides, where Keras's "same" would pad only below and on the right for a stride of two.
    initial = keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
    convolution = layers.Conv2D(features, 3, stride, use_bias=False, kernel_initializer=initial)
    return convolution(layers.ZeroPadding2D(1)(inputs))


def _normalised(inputs: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(inputs)


def loss(labels: Any, predictions: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(LEARNING_RATE, epsilon=1e-8)


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def callbacks() -> list[object]:
    """The learning rate by epoch, times the number of workers (a fixed batch per worker is assumed)."""
    # Imported here, so that the model can be used where there is no Horovod.
    import horovod.tensorflow as hvd

    from elasticdl.callbacks import LearningRateScheduler

    def schedule(epoch: int) -> float:
        return learning_rate(epoch) * float(hvd.size())

    return [LearningRateScheduler(schedule)]


def dataset(mode: str, path: str) -> Arrays:
    """The training batches, augmented, or the test batch of the CIFAR-10 at `path`: 32x32x3 images, labels 0..9.

    Raises:
        ValueError: `mode` is unknown, or there is no whole CIFAR-10 at `path`.
    """
    images, labels = open_split(mode, path)
    channels_last = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return Arrays(channels_last, labels, _augmented if mode == "training" else _scaled)


def _scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (images.astype(np.float32) - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)


def _augmented(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Each image a random crop (of the image with a margin) and flip, drawn from NumPy's global generator."""
    count = len(images)
    padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    top, left = np.random.randint(0, 2 * PADDING + 1, (2, count, 1))
    rows, columns = top + np.arange(32), left + np.arange(32)
    flipped = np.random.randint(0, 2, count).astype(bool)
    columns[flipped] = columns[flipped, ::-1]
    return _scaled(padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]])
