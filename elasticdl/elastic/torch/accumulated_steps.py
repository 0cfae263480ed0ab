"""Run:AI's own loop, over the batches of a prepared loader: what takes the place of `elasticdl.ga.torch.optim.Optimizer` there.

The script calls ``step()`` after each batch, and each ``steps``-th call makes an optimizer step. So ``steps`` batches of the loader are
one global batch, of each of which every worker has its part. Here the gradients stay in ``p.grad`` until then, weighed, as
they are summed over the workers there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.loop_host import LoopHost
from elasticdl.elastic.torch_kit.own_loader import OpenBatch
from elasticdl.ga.torch import optim


class AccumulatedSteps(optim.Optimizer):
    """In the place of the script's ``Optimizer(optimizer, steps)``, once ``optimizer`` is the loop's."""

    def __init__(self, given: optim.Optimizer, host: LoopHost) -> None:
        """Raises:
        UserError: gradients were given to it before.
        """
        super().__init__(given.optimizer, given.steps)
        if optim.STATE_KEY in given.state_dict():
            raise UserError(
                "elastic.prepare: the optimizer has accumulated gradients already; prepare it before the loop"
            )
        self._given, self._host = given, host
        self._handed = 0  # batches whose gradients were given to `step` since the optimizer's last one
        self._is_late = False  # what the script does has no effect

    @property
    def will_step(self) -> bool:
        self._open_batches()
        return self._handed + 1 >= self.steps

    def step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None, loss: Any = None) -> Any:
        """``loss``: for reports; those are told here anyway."""
        self._require(samples)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.stepped = self._hand_over()
        if self.stepped:
            self._make_step()
        return loss if closure is not None else None

    def flush(self) -> bool:
        if self._handed:
            raise UserError(
                f"optimizer.flush() in a prepared loop: each step is made of {self.steps} batches; give the loader such a number of them, or leave "
                "flush() out: an accumulation may go over the end of an epoch"
            )
        return False

    def discard(self) -> None:
        if self._handed:
            raise UserError("optimizer.discard() in a prepared loop: the gradients of all workers are to be summed")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing, where gradients wait for the rest of their global batch."""
        open_batches = self._open_batches()
        if self._handed and open_batches and open_batches[-1].backwards and self._handed < len(open_batches):
            raise UserError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step(): call it before or after both"
            )
        if not self._handed:
            self.optimizer.zero_grad(set_to_none)

    # -- details --

    def _hand_over(self) -> bool:
        """Whether a step of the optimizer is due."""
        open_batches = self._open_batches()
        self._handed += 1
        if open_batches is not None and self._handed != len(open_batches):
            raise UserError(
                f"optimizer.step() was called {self._handed} times for {len(open_batches)} batches: call it once after each "
                f"batch's loss.backward(); each {self.steps}th call makes a step of the optimizer"
            )
        return self._handed >= self.steps

    def _open_batches(self) -> Sequence[OpenBatch] | None:
        open_batches = self._host.open_batches
        if open_batches is None:
            self._is_late = True
        elif self._is_late:
            # It has come to where the job stands, which is between two steps, with whichever batch its own count began.
            self._handed, self._is_late = 0, False
        return open_batches

    def _make_step(self) -> None:
        try:
            self.optimizer.step()
            self.optimizer.zero_grad()
        finally:
            self._handed = 0
            self._given._opt_called = True  # type: ignore[attr-defined]  # a scheduler of it would warn otherwise

    def _require(self, samples: float | None) -> None:
        if samples is not None:
            raise UserError(
                "optimizer.step(samples=) in a prepared loop: leave it out; parts of a batch are weighed by their samples"
            )
        if self.__dict__.get("grad_scale") is not None or "found_inf" in self.__dict__:
            raise UserError(
                "elastic.prepare: a GradScaler with an optimizer of elasticdl.ga: train with torch.bfloat16, which needs no scaler, or "
                "accumulate in the loop itself"
            )
