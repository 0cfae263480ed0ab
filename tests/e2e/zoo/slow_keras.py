"""Real digits on an MLP without dropout, in Keras; the environment can make it slow."""

import os
import time
from pathlib import Path

import keras

from model_zoo.digits.data import BRIGHTEST, read_digits

_delay = float(os.environ.get("TEST_MICRO_BATCH_SECONDS", "0"))
_slow_while = Path(os.environ.get("TEST_SLOW_WHILE", "/"))  # slow as long as this is there
_writes = Path(os.environ.get("TEST_CALLBACK_FOLDER", "/nowhere"))


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
    """As slow as many micro-batches would make it, and slower with each: what a test waits for comes before the last."""

    def __init__(self):
        super().__init__()
        self._count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self._count += 1
        if _slow_while.exists():
            time.sleep(min(_delay, 0.05 * 1.05**self._count))


def callbacks():
    logger = [keras.callbacks.CSVLogger(_writes / "epochs.csv")] if _writes.exists() else []
    return [Slow(), *logger]
