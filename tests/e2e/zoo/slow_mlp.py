"""Real digits on an MLP without dropout; the environment can make it slow, or make it fail."""

import os
import time
from pathlib import Path

import torch
from torch.nn import functional

from model_zoo.digits.data import BRIGHTEST, read_digits

_delay = float(os.environ.get("TEST_MICRO_BATCH_SECONDS", "0"))
_slow_while = Path(os.environ.get("TEST_SLOW_WHILE", "/"))  # slow as long as this is there
_fail_at = int(os.environ.get("TEST_FAIL_AT_MICRO_BATCH", "0"))
_count = 0


def custom_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 10))


def loss(labels, predictions):
    global _count
    _count += 1
    if _fail_at and _count == _fail_at and os.environ.get("ELASTICDL_WORKER_ID") == "1":
        raise KeyError("a mistake in the user's loss")
    if _slow_while.exists():
        time.sleep(_delay * min(10, 1 + _count / 100))  # so that what a test waits for comes before the last
    return functional.cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def dataset(mode, path):
    if path and not Path(path).exists():
        raise FileNotFoundError(path)
    images, labels = map(torch.from_numpy, read_digits())
    images = (images / BRIGHTEST).float()
    cut = slice(None, 1500) if mode == "training" else slice(1500, None)
    return torch.utils.data.TensorDataset(images[cut], labels[cut])


def eval_metrics_fn():
    return {"accuracy": lambda labels, outputs: float((outputs.argmax(1) == labels).float().mean())}
