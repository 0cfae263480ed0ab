"""A softmax regression whose workers write every loss down, and are as slow as the test wants them.

`$WATCHED` is a folder of the test's, mounted into every pod:

    slow         while it is there, each step takes the seconds that are written in it
    losses/N     a line `STEP LOSS` for each step that worker N has made
"""

import contextlib
import os
import time
from pathlib import Path

import torch
from torch.nn import functional

from elasticdl.callbacks import Callback

SAMPLES, FEATURES, CLASSES = 12_000, 8, 4
_folder = Path(os.environ.get("WATCHED", "/nowhere"))


def custom_model():
    """Convex and from zero: rounding, which depends on who adds up what, does not grow from step to step."""
    model = torch.nn.Linear(FEATURES, CLASSES)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def loss(labels, predictions):
    return functional.cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def dataset(mode, path):
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    truth = torch.randn(FEATURES, CLASSES, generator=generator)
    noise = torch.randn(SAMPLES, CLASSES, generator=generator)
    labels = (inputs @ truth + noise).argmax(1)
    cut = slice(None) if mode == "training" else slice(200)
    return torch.utils.data.TensorDataset(inputs[cut], labels[cut])


class Watched(Callback):
    def on_train_begin(self):
        worker = os.environ["ELASTICDL_WORKER_ID"]
        self._losses = os.open(_folder / "losses" / worker, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_train_batch_end(self, step, logs):
        os.write(self._losses, f"{step} {logs['loss']!r}\n".encode())  # whole, or not at all
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float((_folder / "slow").read_text()))

    def on_train_end(self):
        os.close(self._losses)


def callbacks():
    return [Watched()]
