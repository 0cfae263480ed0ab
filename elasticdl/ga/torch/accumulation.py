"""The gradients of the micro-batches seen so far: their weighted sum, kept apart from ``parameter.grad``.

Apart, because then whatever a training loop does to ``parameter.grad`` between two micro-batches (``zero_grad``, a
`GradScaler`) concerns the one micro-batch that it means, and never those before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elasticdl.common.errors import UserError


@dataclass(slots=True)
class Accumulation:
    """What has been taken in since the last optimizer step.

    A parameter that got no gradient in some of the micro-batches counts as having got zero there; one that got none in
    any has no sum, and the optimizer will leave it alone, as it would after one big batch.
    """

    count: int = 0  # micro-batches
    weight: float = 0.0  # of all of them
    by_samples: bool = False  # weights are sample counts; otherwise each is 1
    sums: dict[Tensor, Tensor] = field(default_factory=dict)
    overflow: Tensor | None = None  # more than zero: a GradScaler found a gradient that is not finite

    @torch.no_grad()
    def take(self, params: Iterable[Tensor], samples: float | None, scale: Tensor | None) -> bool:
        """Move the gradients of one micro-batch in here; False if there are none, which then changes nothing.

        ``scale``: what the gradients were multiplied with; taken out, so that it may differ between micro-batches.
        """
        having = [(param, param.grad) for param in params if param.grad is not None]
        if not having:
            return False
        self._check_weight(samples)
        weight = 1.0 if samples is None else float(samples)
        for param, grad in having:
            param.grad = None
            self._add(param, grad.detach(), weight, scale)
        self.weight += weight
        self.count += 1
        return True

    def _check_weight(self, samples: float | None) -> None:
        if self.count and self.by_samples != (samples is not None):
            raise UserError("give the number of samples to every micro-batch of an accumulation, or to none")
        self.by_samples = samples is not None

    def _add(self, param: Tensor, grad: Tensor, weight: float, scale: Tensor | None) -> None:
        # Half precision would lose what is small beside the sum; one big batch sums in single precision, too.
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if scale is not None:
            grad = grad / scale.to(grad.device)
        if param in self.sums:
            self.sums[param].add_(grad, alpha=weight)
        else:
            self.sums[param] = grad * weight  # a copy: the memory of a gradient may be shared with others

    def note_overflow(self, found: Any) -> None:
        """Remember what a GradScaler found in a micro-batch, without waiting for the device."""
        if isinstance(found, Tensor):
            self.overflow = found.clone() if self.overflow is None else self.overflow + found.to(self.overflow.device)

    @property
    def overflowed(self) -> bool:
        return self.overflow is not None and bool(self.overflow)

    @torch.no_grad()
    def put_mean(self, params: Iterable[Tensor]) -> None:
        """Move the mean into the ``grad`` of the parameters; what they held is replaced."""
        for param in params:
            total = self.sums.pop(param, None)
            param.grad = None if total is None else total.div_(self.weight).to(param.dtype)

    def state(self, params: Iterable[Tensor]) -> dict[str, Any]:
        """Plain values and tensors, the latter by the index of their parameter, as in torch's optimizer states."""
        return {
            "count": self.count,
            "weight": self.weight,
            "by_samples": self.by_samples,
            "sums": {index: self.sums[param] for index, param in enumerate(params) if param in self.sums},
            "overflowed": self.overflowed,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], params: Iterable[Tensor]) -> Accumulation:
        """The inverse of `state`; sums are copied to where their parameters are."""
        sums = state["sums"]
        return cls(
            count=state["count"],
            weight=state["weight"],
            by_samples=state["by_samples"],
            sums={
                param: sums[index].detach().to(param.device, copy=True)
                for index, param in enumerate(params)
                if index in sums
            },
            overflow=torch.ones(()) if state["overflowed"] else None,
        )
