"""The models and the data for all that trains with PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.data import TensorDataset

from benchmarks.models import CLASSES, LAYERS, WORKER_BATCH


def make_model(name: str) -> torch.nn.Sequential:
    """A multi-layer perceptron with about as many parameters as its name says; always the same initial weights."""
    torch.manual_seed(0)
    sizes = LAYERS[name]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_dataset(name: str, samples: int) -> TensorDataset:
    """Random samples in memory, so that reading never decides a measurement."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, LAYERS[name][0], generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (samples,), generator=generator))


def warm_up(name: str) -> None:
    """Pay what a process pays for its first step (imports, memory, thread pools), on a model that is thrown away."""
    model = make_model(name)
    optimizer = make_optimizer(model)
    images, labels = make_dataset(name, WORKER_BATCH).tensors
    torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
