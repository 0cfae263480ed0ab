"""Torch's optimizers, made to accumulate gradients.

    optimizer = optim.Optimizer(torch.optim.Adam(model.parameters()), steps=STEPS)
    optimizer = optim.Adam(STEPS, model.parameters())

The ready-made ones take ``steps`` first or by name, then what torch's class of that name takes. Optimizers that evaluate
a closure several times in one step (LBFGS) cannot be fed one micro-batch after the other and are refused.
"""

from __future__ import annotations

import torch

from elasticdl.ga.steps import ReadyMade, ready_made
from elasticdl.ga.torch.optimizer import Optimizer

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
]


def _ready_made(wraps: type[torch.optim.Optimizer]) -> type[Optimizer]:
    return ready_made(wraps, ReadyMade, Optimizer, place=__name__)


Adadelta = _ready_made(torch.optim.Adadelta)
Adagrad = _ready_made(torch.optim.Adagrad)
Adam = _ready_made(torch.optim.Adam)
Adamax = _ready_made(torch.optim.Adamax)
AdamW = _ready_made(torch.optim.AdamW)
ASGD = _ready_made(torch.optim.ASGD)
NAdam = _ready_made(torch.optim.NAdam)
RAdam = _ready_made(torch.optim.RAdam)
RMSprop = _ready_made(torch.optim.RMSprop)
Rprop = _ready_made(torch.optim.Rprop)
SGD = _ready_made(torch.optim.SGD)
SparseAdam = _ready_made(torch.optim.SparseAdam)


# Torch has these since 2.5 and 2.9.
if hasattr(torch.optim, "Adafactor"):
    Adafactor = _ready_made(torch.optim.Adafactor)
    __all__ += ["Adafactor"]
if hasattr(torch.optim, "Muon"):
    Muon = _ready_made(torch.optim.Muon)
    __all__ += ["Muon"]
