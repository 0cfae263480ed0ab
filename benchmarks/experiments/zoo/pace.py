"""A simulated GPU: real arithmetic, and then sleep until the time that a GPU would take has passed.

It is simulated where $EXPERIMENT_SECONDS_PER_SAMPLE says how long a sample takes: loading, forward, backward and its part
of the update. What comes on top of that is what the workers do together. So four workers on two cores take as long as on
four GPUs, as long as their arithmetic takes less than the pace.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

VARIABLE = "EXPERIMENT_SECONDS_PER_SAMPLE"
FORWARD_PART = 1 / 3  # of the time of a sample: a backward pass takes about twice as long as a forward pass
# An update that was longer ago than this part of a step's time was not just before: workers came or went.
UPDATE_PART = 0.2
_ATTRIBUTE = "simulated_pace"  # of the model's first parameter, which its optimizer knows, too


def at_pace(model: torch.nn.Module, *, free_first_step: bool = True) -> torch.nn.Module:
    """The model, slowed down if the environment says so. What is computed is the same.

    ``free_first_step``: the first step of a process is a warm-up, which on a GPU takes no time.
    """
    seconds = float(os.environ.get(VARIABLE) or 0)
    if seconds:
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        setattr(first, _ATTRIBUTE, Pace(model, first, seconds, free_first_step=free_first_step))
    return model


def updated_at_pace(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer; its updates count as a part of what the samples take, if its model is at pace."""
    pace: Pace | None = getattr(optimizer.param_groups[0]["params"][0], _ATTRIBUTE, None)
    if pace:
        pace.optimizer = optimizer
    return optimizer


class Pace:
    """Lives in the hooks of the model and, from the first step on, of its optimizer."""

    def __init__(
        self, model: torch.nn.Module, first: torch.nn.Parameter, seconds: float, *, free_first_step: bool
    ) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self._seconds = seconds
        self._warm = not free_first_step
        self._until = 0.0
        self._update_began = 0.0
        self._follows_updates = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end_forward)
        # The last gradient that a backward pass makes.
        first.register_post_accumulate_grad_hook(self._end_backward)  # type: ignore[no-untyped-call]

    def _begin(self, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        now, work = time.monotonic(), len(inputs[0]) * self._seconds
        if not model.training:
            self._until = now + work * FORWARD_PART
        elif not self._warm:
            self._until = 0.0
        else:
            self._until = work + (self._update_began if now - self._update_began < UPDATE_PART * work else now)
            self._update_began = 0.0
            self._follow_updates()

    def _follow_updates(self) -> None:
        """Only now: the reduction of gradients is a hook, too, and the update begins after it."""
        if self.optimizer and not self._follows_updates:
            self._follows_updates = True
            self.optimizer.register_step_pre_hook(self._begin_update)

    def _begin_update(self, *_: Any) -> None:
        self._update_began = time.monotonic()

    def _end_forward(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if not model.training:
            self._sleep()

    def _end_backward(self, parameter: torch.Tensor) -> None:
        self._warm = True
        self._sleep()

    def _sleep(self) -> None:
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(left)
