"""Real digits on an MLP without dropout, in Keras; slow while the file is there that the environment names."""

import os
import time
from pathlib import Path

import keras

from model_zoo.digits.data import BRIGHTEST, read_digits


def custom_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(96, "tanh"), keras.layers.Dense(10)])


def loss(labels, predictions):
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def optimizer():
    return keras.optimizers.SGD(0.1, momentum=0.9)


class Digits:
    def __init__(self, cut):
        images, labels = read_digits()
        self.images, self.labels = (images[cut] / BRIGHTEST).astype("float32"), labels[cut]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def dataset(mode, path):
    return Digits(slice(None, 1500) if mode == "training" else slice(1500, None))


def eval_metrics_fn():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy}


class Slow(keras.callbacks.Callback):
    """The more so the later: what a test waits for comes before the last step."""

    count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1
        if Path(os.environ["TEST_SLOW_WHILE"]).exists():
            time.sleep(min(0.7, 0.05 * 1.05**self.count))


def callbacks():
    return [Slow()]
