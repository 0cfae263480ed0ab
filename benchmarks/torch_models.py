"""The models and the data for all that trains with PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.data import TensorDataset

from benchmarks.experiments.zoo.pace import at_pace
from benchmarks.models import CLASSES, LAYERS, RESNET20, worker_batch
from model_zoo.cifar10 import resnet20_torch

IMAGE = (3, 32, 32)  # as CIFAR-10 has them


def make_model(name: str) -> torch.nn.Module:
    """Always the same initial weights. ResNet20 takes the time of a simulated GPU, if the environment says so."""
    model = _make_bare(name)
    return at_pace(model, free_first_step=False) if name == RESNET20 else model


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_dataset(name: str, samples: int) -> TensorDataset:
    """Random samples in memory, so that reading never decides a measurement."""
    generator = torch.Generator().manual_seed(1)
    if name == RESNET20:
        values = IMAGE[0] * IMAGE[1] * IMAGE[2]
        row = torch.randn(values + samples - 1, generator=generator)
        images = row.unfold(0, values, 1).view(samples, *IMAGE)  # windows of one row: as many as wanted, in no memory
    else:
        images = torch.randn(samples, LAYERS[name][0], generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (samples,), generator=generator))


def warm_up(name: str) -> None:
    """Pay what a process pays for its first step (imports, memory, thread pools), on a model that is thrown away."""
    model = _make_bare(name)
    optimizer = make_optimizer(model)
    images, labels = make_dataset(name, worker_batch(name)).tensors
    torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _make_bare(name: str) -> torch.nn.Module:
    """At no pace. A perceptron has about as many parameters as its name says."""
    torch.manual_seed(0)
    if name == RESNET20:
        return resnet20_torch.custom_model()
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(LAYERS[name]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
