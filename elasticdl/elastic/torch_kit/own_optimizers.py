"""Refuses optimizers that a script steps beside those that it has given: the workers do not sum the gradients of their parameters."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.optimizers import Optimizers, each_of

Look = Callable[[torch.optim.Optimizer], None]

_of_thread = threading.local()  # each worker's, where several are threads of a process


def look_before_steps(purpose: str, look: Look | None) -> None:
    """Have ``look`` called before each step of any optimizer, which it may refuse. None: nothing looks for this purpose any more."""
    _hook_steps()
    looks = _of_thread.__dict__
    looks.pop(purpose, None)
    if look is not None:
        looks[purpose] = look


@functools.cache
def _hook_steps() -> None:
    """Once in a process."""

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # it would be traced
            for look in list(_of_thread.__dict__.values()):
                look(optimizer)

    register_optimizer_step_pre_hook(before_step)


class OwnOptimizers:
    """Refuses them while a batch is trained on, before they step."""

    def __init__(
        self,
        model: torch.nn.Module,
        trained_with: torch.optim.Optimizer | Optimizers,
        batch: Callable[[], tuple[int, int] | None],
        remedy: str,
    ) -> None:
        """``trained_with``: has the parameters of which the gradients are summed. ``batch``: which is trained on; None between two of them."""
        self._model = model
        self._trained_with = trained_with
        self._batch = batch
        self._remedy = remedy
        # Beside the model's own parameters there may be copies, of which each batch has an optimizer of its own, as in meta-learning.
        self._met: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        look_before_steps("own optimizers", self.require_none)

    def require_none(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step.

        Raises:
            UserError: by gradients that are not summed.
        """
        batch = self._batch()
        known = each_of(self._trained_with)
        if batch is None or any(optimizer is each for each in known):
            return
        summed = set(map(id, Optimizers(known).parameters))
        groups = set(map(id, Optimizers(known).param_groups))
        stepped = Optimizers([optimizer]).parameters
        if any(id(each) in summed for each in stepped):
            if groups.issuperset(map(id, optimizer.param_groups)):
                return  # one within another, which steps the parameters by the groups of that one
            raise UserError(
                f"{type(optimizer).__name__} steps the parameters of an optimizer that trains already, as one that was made anew within training: workers that "
                f"come later have none of its state. Make it at the begin, and {self._remedy}; set param_groups to change a rate"
            )
        beside = {id(each): each for each in stepped if each.grad is not None}
        if not beside:
            return
        names = [name for name, each in self._model.named_parameters() if id(each) in beside]
        if not names and self._met.setdefault(optimizer, batch) == batch:
            return
        what = f"`{names[0]}`" if names else f"a parameter of shape {tuple(next(iter(beside.values())).shape)}"
        raise UserError(
            f"{type(optimizer).__name__} steps {what} by the gradient of this worker's part of a batch, and the workers do not sum it, as the optimizer is "
            f"the script's own: {self._remedy}"
        )
