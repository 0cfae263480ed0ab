"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Optimizers:
    """Those of a script as one, as far as a training state can tell.

    They step by themselves. `made` says that they have done so for this batch.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.every = optimizers
        self._hooks: list[Callable[..., Any]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.every for group in each.param_groups]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Each once."""
        every = (parameter for group in self.param_groups for parameter in group["params"])
        return list({id(parameter): parameter for parameter in every}.values())

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {}  # `load_state_dict` clears theirs

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [each.state_dict() for each in self.every]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, saved in zip(self.every, state["optimizers"], strict=True):
            each.state.clear()
            each.load_state_dict(saved)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> None:
        self._hooks.append(hook)

    register_step_post_hook = register_step_pre_hook

    def made(self) -> None:
        for hook in self._hooks:
            hook(self)


def each_of(optimizer: Any) -> Sequence[torch.optim.Optimizer]:
    """``optimizer``: one, or `Optimizers`."""
    return optimizer.every if isinstance(optimizer, Optimizers) else [optimizer]
