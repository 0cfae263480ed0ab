"""ResNet20 on CIFAR-10, as `model_zoo/cifar10/resnet20_torch.py` has it, at the pace of a GPU, each step logged."""

from __future__ import annotations

import torch

from benchmarks.experiments.zoo.pace import at_pace
from benchmarks.experiments.zoo.step_log import StepLog
from elasticdl.callbacks import Callback
from model_zoo.cifar10 import resnet20_torch
from model_zoo.cifar10.resnet20_torch import accuracy as accuracy
from model_zoo.cifar10.resnet20_torch import dataset as dataset
from model_zoo.cifar10.resnet20_torch import eval_metrics_fn as eval_metrics_fn
from model_zoo.cifar10.resnet20_torch import loss as loss
from model_zoo.cifar10.resnet20_torch import optimizer as optimizer


def custom_model() -> torch.nn.Module:
    return at_pace(resnet20_torch.custom_model())


def callbacks() -> list[Callback]:
    return [StepLog()]
