"""A two-layer perceptron for the digits, for exact comparisons.

It has neither batch norm nor dropout, so a sample's loss and gradient depend on the weights and on nothing
else: however a global batch is cut into micro-batches, the loss of each step is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn, optim

from .task import dataset, eval_metrics_fn, loss

__all__ = ["custom_model", "dataset", "eval_metrics_fn", "loss", "optimizer"]


def custom_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.2, momentum=0.9)
