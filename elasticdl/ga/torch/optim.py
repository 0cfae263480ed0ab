"""Torch's optimizers, made to accumulate gradients.

    optimizer = optim.Optimizer(torch.optim.Adam(model.parameters()), steps=STEPS)
    optimizer = optim.Adam(STEPS, model.parameters())

The ready-made ones take ``steps`` first or by name, then what torch's class of that name takes. Optimizers that evaluate
a closure several times in one step (LBFGS) cannot be fed one micro-batch after the other and are refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from elasticdl.common.errors import ArgumentError
from elasticdl.ga.steps import checked_steps
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


class ReadyMade(Optimizer):
    """Makes the optimizer that it wraps."""

    wraps: ClassVar[type[torch.optim.Optimizer]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """``(steps, params, ...)`` or ``(params, ..., steps=steps)``; the rest is as for torch's class."""
        if "steps" not in kwargs:
            if not args:
                raise ArgumentError(f"{type(self).__name__}(steps, params, ...) needs steps")
            kwargs["steps"], args = args[0], args[1:]
        steps = checked_steps(kwargs.pop("steps"))
        super().__init__(self.wraps(*args, **kwargs), steps)


class Adadelta(ReadyMade):
    wraps = torch.optim.Adadelta


class Adagrad(ReadyMade):
    wraps = torch.optim.Adagrad


class Adam(ReadyMade):
    wraps = torch.optim.Adam


class Adamax(ReadyMade):
    wraps = torch.optim.Adamax


class AdamW(ReadyMade):
    wraps = torch.optim.AdamW


class ASGD(ReadyMade):
    wraps = torch.optim.ASGD


class NAdam(ReadyMade):
    wraps = torch.optim.NAdam


class RAdam(ReadyMade):
    wraps = torch.optim.RAdam


class RMSprop(ReadyMade):
    wraps = torch.optim.RMSprop


class Rprop(ReadyMade):
    wraps = torch.optim.Rprop


class SGD(ReadyMade):
    wraps = torch.optim.SGD


class SparseAdam(ReadyMade):
    wraps = torch.optim.SparseAdam


# Torch has these since 2.5 and 2.9.
if hasattr(torch.optim, "Adafactor"):

    class Adafactor(ReadyMade):
        wraps = torch.optim.Adafactor

    __all__ += ["Adafactor"]

if hasattr(torch.optim, "Muon"):

    class Muon(ReadyMade):
        wraps = torch.optim.Muon

    __all__ += ["Muon"]
