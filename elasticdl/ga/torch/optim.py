"""Torch's optimizers, made to accumulate gradients.

    optimizer = optim.Optimizer(torch.optim.Adam(model.parameters()), steps=STEPS)
    optimizer = optim.Adam(STEPS, model.parameters())

There is a ready-made one for each that torch has. They take ``steps`` first or by name, then what torch's class takes. Optimizers that evaluate
a closure several times in one step (LBFGS) cannot be fed one micro-batch after the other and are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from elasticdl.ga.steps import ready_made, take_steps
from elasticdl.ga.torch.optimizer import Optimizer


class ReadyMade(Optimizer):
    """Makes the optimizer that it wraps."""

    wraps: ClassVar[type[torch.optim.Optimizer]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """``(steps, params, ...)`` or ``(params, ..., steps=steps)``; the rest is as for torch's class."""
        steps, args = take_steps(f"{type(self).__name__}(steps, params, ...)", args, kwargs)
        super().__init__(self.wraps(*args, **kwargs), steps)


_made = ready_made(ReadyMade, torch.optim, torch.optim.Optimizer, without={"LBFGS"})
globals().update(_made)
__all__ = ["Optimizer", *_made]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[ReadyMade]: ...
