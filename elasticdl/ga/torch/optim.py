"""Torch's optimizers, made to accumulate gradients.

    optimizer = optim.Optimizer(torch.optim.Adam(model.parameters()), steps=STEPS)
    optimizer = optim.Adam(STEPS, model.parameters())

There is a ready-made one for each that torch has. They take ``steps`` first or by name, then what torch's class takes.
Optimizers that evaluate a closure several times in one step (LBFGS) cannot be fed one micro-batch after the other and are
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elasticdl.ga.steps import ReadyMade, ready_made
from elasticdl.ga.torch.optimizer import Optimizer

_made = ready_made(torch.optim, torch.optim.Optimizer, {"LBFGS"}, ReadyMade, Optimizer, place=__name__)
globals().update(_made)
__all__ = ["Optimizer", *_made]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Optimizer]: ...
