"""ResNet20 as `model_zoo/cifar10/resnet20_torch.py` has it, on CIFAR-10 or on digits of the same shape.

Of CIFAR-10 each access draws another crop, from a generator that depends on the worker's rank; of the digits nothing is
random, so that equal batches are equal whoever trains them.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

from benchmarks.experiments.convergence.exact import add_exactly
from benchmarks.experiments.convergence.hold import Hold
from benchmarks.experiments.convergence.settings import Data, Policy, Settings, Step, shared_folder
from elasticdl.callbacks import Callback, LearningRateScheduler, Logs
from model_zoo.cifar10 import resnet20_torch
from model_zoo.cifar10.recipe import learning_rate
from model_zoo.cifar10.resnet20_torch import eval_metrics_fn as eval_metrics_fn
from model_zoo.cifar10.resnet20_torch import loss as loss
from model_zoo.cifar10.resnet20_torch import optimizer as optimizer
from model_zoo.digits.data import read_split

SIDE = 32


def custom_model() -> torch.nn.Module:
    model = resnet20_torch.custom_model()
    model.register_forward_pre_hook(_channels_last)
    return add_exactly(model) if Settings.read(os.environ).policy is Policy.BATCH else model


def _channels_last(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same images in an order of memory with which convolutions on a CPU are a fifth faster."""
    return tuple(each.contiguous(memory_format=torch.channels_last) for each in inputs)


def dataset(mode: str, path: str) -> Dataset[Any]:
    """Raises:
    ValueError: there is no such data at ``path``, or too little of it.
    """
    settings = Settings.read(os.environ)
    whole: Any = (resnet20_torch.dataset if settings.data is Data.CIFAR10 else digits)(mode, path)
    if mode != "training":
        return cast("Dataset[Any]", whole)
    if len(whole) < settings.samples:
        raise ValueError(f"{path}: {len(whole):,} training images; the experiment takes {settings.samples:,} of them")
    return Subset(whole, range(settings.samples))


def digits(mode: str, path: str) -> TensorDataset:
    """8 x 8 grey values from 0 to 1, as 3 x 32 x 32 from -1 to 1."""
    images, labels = read_split(mode, path)
    grey = torch.from_numpy(images).unsqueeze(1) * 2 - 1
    large = functional.interpolate(grey, size=(SIDE, SIDE), mode="bilinear")
    return TensorDataset(large.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(labels))


class Record(Callback):
    """Each step into the job's folder, by rank 0."""

    def __init__(self) -> None:
        self._size, self._rank = 0, 0

    def on_world_change(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        if self._rank == 0:
            Step(step, self._size, logs["loss"], logs["learning_rate"]).append(shared_folder(os.environ))


def callbacks() -> list[Callback]:
    """The published schedule, its epochs brought to those of this run."""
    import horovod.torch as hvd

    settings = Settings.read(os.environ)

    def schedule(epoch: int) -> float:
        workers = settings.reference if settings.policy is Policy.BATCH else hvd.size()
        return learning_rate(round(epoch * settings.epoch_factor)) * float(workers)

    return [LearningRateScheduler(schedule), Record(), Hold(shared_folder(os.environ), settings.holds)]
