"""A model that puts out the number of each sample, with metrics that count; slow enough for somebody to be killed meanwhile."""

import os
import time

import keras
import numpy as np

SAMPLES = 1500


class Numbers:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(float(os.environ.get("TEST_SAMPLE_SECONDS", "0")))
        return np.array([index], np.float32), np.float32(index)


def custom_model():
    ones = keras.initializers.Ones()
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer=ones, use_bias=False)])


def dataset(mode, path):
    return Numbers()


def loss(labels, predictions):
    return keras.ops.abs(predictions[:, 0] - labels)


def optimizer():
    return keras.optimizers.SGD(0.0)


def eval_metrics_fn():
    return {
        "sum": lambda labels, outputs: float(keras.ops.sum(keras.ops.cast(labels, "float64"))),
        "largest": lambda labels, outputs: float(keras.ops.max(outputs)),
        "error": keras.metrics.MeanAbsoluteError,
    }
