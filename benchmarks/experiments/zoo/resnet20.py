"""ResNet20 on CIFAR-10, as `model_zoo/cifar10/resnet20_torch.py` has it, at the pace of a GPU, each step logged."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.experiments.zoo.pace import at_pace, updated_at_pace
from benchmarks.experiments.zoo.step_log import StepLog
from elasticdl.callbacks import Callback
from model_zoo.cifar10 import resnet20_torch
from model_zoo.cifar10.resnet20_torch import accuracy as accuracy
from model_zoo.cifar10.resnet20_torch import dataset as dataset
from model_zoo.cifar10.resnet20_torch import eval_metrics_fn as eval_metrics_fn
from model_zoo.cifar10.resnet20_torch import loss as loss


def custom_model() -> torch.nn.Module:
    return at_pace(resnet20_torch.custom_model())


def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return updated_at_pace(resnet20_torch.optimizer(parameters))


def callbacks() -> list[Callback]:
    return [StepLog()]
