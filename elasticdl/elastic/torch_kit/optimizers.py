"""Several optimizers as one, and those that can't be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError


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


def is_other_kind(there: Any, here: Any) -> bool:
    """Whether these states are of optimizers of two kinds."""
    if ("optimizers" in there) != ("optimizers" in here):
        return True
    if "optimizers" in there:
        pairs = zip(there["optimizers"], here["optimizers"], strict=False)
        return len(there["optimizers"]) != len(here["optimizers"]) or any(is_other_kind(*each) for each in pairs)
    groups = zip(there["param_groups"], here["param_groups"], strict=False)
    # Both have options that the other lacks; a newer version of the same optimizer only has more of them.
    return any(was.keys() - now.keys() and now.keys() - was.keys() for was, now in groups)


def require_summable(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Raises:
    UserError: it needs gradients of a kind that workers can't sum for it, or sums them itself.
    """
    kind = type(optimizer)
    if any(each.__name__ == "AcceleratedOptimizer" for each in kind.__mro__):
        raise UserError(
            f"{who}: the optimizer was prepared by accelerate, for its own launcher: leave Accelerator out, and give the model, optimizer and "
            "loader that accelerator.prepare was given"
        )
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise UserError(
            f"{who}: the optimizer is Horovod's DistributedOptimizer: give the one within: gradients are summed anyway"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"{who}: LBFGS evaluates its closure several times a step, and the workers would sum but one of the gradients: "
            "take an optimizer that needs each gradient once"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError(
            f"{who}: SparseAdam takes sparse gradients alone, and the sum over several workers is a dense one: take Adagrad or "
            "SGD, which take both, or Adam with Embedding(sparse=False)"
        )
