"""A job of which it is known how it scales: the arithmetic of a tiny model, and sleep for what a GPU and a network would take.

$EXPERIMENT_STEP is SERIAL;PER_SAMPLE;NETWORK;GROWTH in seconds: a step takes a worker SERIAL, and PER_SAMPLE for each of its
samples; the reduction takes NETWORK with two workers, and GROWTH more with each further one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from benchmarks.experiments.zoo.step_log import StepLog
from elasticdl.callbacks import Callback
from elasticdl.elastic.torch_kit.reducer import Buckets

VARIABLE = "EXPERIMENT_STEP"
FEATURES = 8


class Times(NamedTuple):
    serial: float
    per_sample: float
    network: float
    growth: float

    @classmethod
    def from_env(cls) -> Times:
        return cls(*map(float, os.environ[VARIABLE].split(";")))


class Model(torch.nn.Linear):
    def __init__(self, times: Times) -> None:
        super().__init__(FEATURES, 1)
        self._times = times

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._times.serial + self._times.per_sample * len(inputs))
        return super().forward(inputs)


class SimulatedNetwork(Callback):
    """A reduction takes as long as on a network. It is part of what a worker waits for, and not of what it computes."""

    def __init__(self, times: Times) -> None:
        self._size = 1
        finish = Buckets.finish

        def finish_late(buckets: Buckets) -> None:
            finish(buckets)
            time.sleep(times.network + times.growth * max(0, self._size - 2))

        Buckets.finish = finish_late  # type: ignore[method-assign, assignment]

    def on_world_change(self, size: int, rank: int) -> None:
        self._size = size


def custom_model() -> torch.nn.Module:
    return Model(Times.from_env())


def dataset(mode: str, path: str) -> torch.utils.data.TensorDataset:
    """``path``: how many samples."""
    inputs = torch.linspace(-1.0, 1.0, FEATURES).repeat(int(path), 1)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loss(labels: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, labels)


def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def callbacks() -> list[Callback]:
    return [SimulatedNetwork(Times.from_env()), StepLog()]
