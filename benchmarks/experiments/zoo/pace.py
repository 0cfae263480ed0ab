"""A simulated GPU: real arithmetic, and then sleep until the time that a GPU would take has passed.

It is simulated where $EXPERIMENT_SECONDS_PER_SAMPLE says how long a sample takes, forward and backward. So four workers
on two cores take as long as on four GPUs, as long as their arithmetic takes less than the pace.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

VARIABLE = "EXPERIMENT_SECONDS_PER_SAMPLE"
FORWARD_PART = 1 / 3  # of the time of a sample: a backward pass takes about twice as long as a forward pass


def at_pace(model: torch.nn.Module, *, free_first_step: bool = True) -> torch.nn.Module:
    """The model, slowed down if the environment says so. What is computed is the same.

    ``free_first_step``: a step before which there are no gradients is a warm-up, which on a GPU takes no time. Not for
    loops that remove their gradients.
    """
    seconds = float(os.environ.get(VARIABLE) or 0)
    if seconds:
        Pace(model, seconds, free_first_step=free_first_step)
    return model


class Pace:
    """Lives in the model's hooks."""

    def __init__(self, model: torch.nn.Module, seconds: float, *, free_first_step: bool) -> None:
        self._seconds = seconds
        self._free_first_step = free_first_step
        self._until = 0.0
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end_forward)
        self._first = first
        # The last gradient that a backward pass makes.
        first.register_post_accumulate_grad_hook(self._end_backward)  # type: ignore[no-untyped-call]

    def _begin(self, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        part = 1.0 if model.training else FORWARD_PART
        self._until = time.monotonic() + len(inputs[0]) * self._seconds * part
        if self._free_first_step and model.training and self._first.grad is None:
            self._until = 0.0

    def _end_forward(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if not model.training:
            self._sleep()

    def _end_backward(self, parameter: torch.Tensor) -> None:
        self._sleep()

    def _sleep(self) -> None:
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(left)
