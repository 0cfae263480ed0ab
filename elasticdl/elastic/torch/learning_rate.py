"""Setting the learning rate of a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch

from elasticdl.elastic.core.learning_rate import LearningRate, RateControl
from elasticdl.elastic.core.world import World


class OptimizerRate(RateControl):
    """Sets an optimizer's rate; of several parameter groups the first has it, and the others keep their ratio to it."""

    def __init__(self, optimizer: torch.optim.Optimizer, rules: LearningRate, *, fixed_batch: bool) -> None:
        self._optimizer = optimizer
        self._own = [_initial(group) for group in optimizer.param_groups]
        super().__init__(rules, self._own[0], fixed_batch=fixed_batch)

    def set(self, step: int, epoch: int, world: World) -> None:
        """Set the rate for the step with this number."""
        rate, first = self.at(step, epoch, world), self._own[0]
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            value = rate if own == first or not first else own * (rate / first)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


def _initial(group: dict[str, Any]) -> float:
    """A group's own rate, kept in the group as torch's schedulers do: it may come from a checkpoint."""
    return float(group.setdefault("initial_lr", float(group["lr"])))
