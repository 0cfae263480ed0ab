"""ResNet20 as `model_zoo/cifar10/resnet20_torch.py` has it, on CIFAR-10 or on digits of the same shape.

Of CIFAR-10 each access draws another crop, from a generator that depends on the worker's rank; of the digits nothing is
random, so that equal batches are equal whoever trains them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

from benchmarks.experiments.convergence.plan import Data, Policy, Step, Task, go_file, held_file, shared_folder
from benchmarks.experiments.zoo.step_log import InWorld
from elasticdl.callbacks import Callback, LearningRateScheduler, Logs
from model_zoo.cifar10 import resnet20_torch
from model_zoo.cifar10.recipe import learning_rate
from model_zoo.cifar10.resnet20_torch import eval_metrics_fn as eval_metrics_fn
from model_zoo.cifar10.resnet20_torch import loss as loss
from model_zoo.cifar10.resnet20_torch import optimizer as optimizer
from model_zoo.digits.data import read_split

SIDE = 32
MANTISSA = 24  # bits of a float32
TERMS = 16  # of gradients whose sum is exact
GRID = 2.0**-20
LIMIT = GRID * 2**MANTISSA / TERMS  # each is a part of the mean over the batch: gradients never come near
HOLD_SECONDS = 280.0  # a worker that makes no progress for 300 is taken to be stuck
POLL = 0.02


def custom_model() -> torch.nn.Module:
    model = resnet20_torch.custom_model()
    model.register_forward_pre_hook(_channels_last)
    return AddedExactly(model) if Task.read(os.environ).job.policy is Policy.BATCH else model


class AddedExactly(torch.nn.Sequential):
    """The model, whose gradients are rounded as each backward pass makes them, so that their sum does not depend on the order.

    Floating-point addition is not associative: cut among three workers instead of two, the same micro-batches give a sum that
    differs in its last bit, and training makes any difference grow. To tell that apart from a different *computation*, each
    micro-batch's gradient is brought to a multiple of ``GRID``, within ``LIMIT``. Then every sum of up to ``TERMS`` of them
    is exact in single precision, so workers that make the same steps make them to the bit. The rounding is part
    of the pass, as elasticdl calls a hook on a parameter with the sum.
    """

    def forward(self, *inputs: torch.Tensor) -> Any:
        on_grid: Callable[[torch.Tensor], torch.Tensor] = _OnGrid.apply
        parameters = {name: on_grid(each) for name, each in self[0].named_parameters()}
        return functional_call(self[0], parameters, inputs)


class _OnGrid(torch.autograd.Function):
    """What it is given; in the backward pass, the gradient as a multiple of ``GRID``."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient / GRID).round_().mul_(GRID).clamp_(-LIMIT, LIMIT)


def _channels_last(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same images in an order of memory with which convolutions on a CPU are a fifth faster."""
    return tuple(each.contiguous(memory_format=torch.channels_last) for each in inputs)


def dataset(mode: str, path: str) -> Dataset[Any]:
    """Raises:
    ValueError: there is no such data at ``path``, or too little of it.
    """
    recipe = Task.read(os.environ).recipe
    whole: Any = (resnet20_torch.dataset if recipe.data is Data.CIFAR10 else digits)(mode, path)
    if mode != "training":
        return cast("Dataset[Any]", whole)
    if len(whole) < recipe.samples:
        raise ValueError(f"{path}: {len(whole):,} training images; the experiment takes {recipe.samples:,} of them")
    return Subset(whole, range(recipe.samples))


def digits(mode: str, path: str) -> TensorDataset:
    """8 x 8 grey values from 0 to 1, as 3 x 32 x 32 from -1 to 1."""
    images, labels = read_split(mode, path)
    grey = torch.from_numpy(images).unsqueeze(1) * 2 - 1
    large = functional.interpolate(grey, size=(SIDE, SIDE), mode="bilinear")
    return TensorDataset(large.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(labels))


class Record(InWorld):
    """Each step into the job's folder, by rank 0."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        if self.rank == 0:
            Step(step, self.size, logs["loss"], logs["learning_rate"]).append(shared_folder(os.environ))


class Hold(InWorld):
    """In a worker: waits after each of these steps until the driver says go, so that each world begins at a known step.

    A change of workers takes effect after the step that follows its announcement, whenever that comes. So the workers wait at
    the end of a step; the driver sees that, asks for the change, waits until the master has announced it, and says go:
    the next step is the last one of the old world.
    """

    def __init__(self, folder: Path, steps: Sequence[int], seconds: float = HOLD_SECONDS) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._seconds = seconds

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        if step not in self._steps:
            return
        if self.rank == 0:
            held_file(self._folder, step).touch()
        deadline = time.monotonic() + self._seconds
        while not go_file(self._folder, step).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"held after step {step}: no go from the driver within {self._seconds:g} s")
            time.sleep(POLL)


def callbacks() -> list[Callback]:
    """The published schedule, its epochs brought to those of this run."""
    import horovod.torch as hvd

    task = Task.read(os.environ)
    job = task.job

    def schedule(epoch: int) -> float:
        workers = task.recipe.reference if job.policy is Policy.BATCH else hvd.size()
        return learning_rate(round(epoch * job.epoch_factor)) * float(workers)

    return [LearningRateScheduler(schedule), Record(), Hold(shared_folder(os.environ), job.holds)]
