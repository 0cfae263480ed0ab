"""Real digits on a small MLP without dropout, whose computing sleeps: some seconds for each sample, and some for each micro-batch,
which more workers don't make less; only while a file is there, if one is named. Worker 1 fails at the micro-batch that is named."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from model_zoo.digits.data import BRIGHTEST, read_digits


class Paced(nn.Module):
    def __init__(self, sample_seconds, fixed_seconds, slow_while, fail_at):
        super().__init__()
        self._layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
        self._sample_seconds, self._fixed_seconds = sample_seconds, fixed_seconds
        self._slow_while, self._fail_at, self._count = slow_while, fail_at, 0

    def forward(self, inputs):
        if self.training:
            self._count += 1
            if self._count == self._fail_at and os.environ.get("ELASTICDL_WORKER_ID") == "1":
                raise KeyError("a mistake of the user's")
            seconds = self._fixed_seconds + self._sample_seconds * len(inputs)
            if not self._slow_while:
                time.sleep(seconds)
            elif Path(self._slow_while).exists():  # longer and longer: what a test waits for comes before the last
                time.sleep(seconds * min(10, 1 + self._count / 100))
        return self._layers(inputs)


def custom_model(sample_seconds=0.0, fixed_seconds=0.0, slow_while="", fail_at=0):
    return Paced(sample_seconds, fixed_seconds, slow_while, fail_at)


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def dataset(mode, path):
    images, labels = map(torch.from_numpy, read_digits())
    cut = slice(None, 1500) if mode == "training" else slice(1500, None)
    return torch.utils.data.TensorDataset((images[cut] / BRIGHTEST).float(), labels[cut])


def eval_metrics_fn():
    return {"accuracy": lambda labels, outputs: float((outputs.argmax(1) == labels).float().mean())}
