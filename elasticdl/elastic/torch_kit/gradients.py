"""The gradients of a loop between its backward passes and its optimizers' steps.

Until they are summed over the workers they are those of this worker's part of the batches in hand, each weighed in its backward
pass. Gradients that come otherwise are not, so they are refused.

With them whether a loss is a mean, and what a script has hooked to its parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.common.errors import UserError

# Whether a loss is a mean over the samples, as far as the functions tell that have made it.
#
# A worker's part of a batch is weighed by its samples. So a sum over samples is refused, and a mean over something else than samples
# (by class weights, or without what is to be ignored) is warned of. What it is otherwise nobody can tell.

SUM = 2  # as functions of torch's keep ``reduction``
# Through which the terms of a sum are looked for.
_PASSED = ("Add", "Sub", "Neg", "View", "Squeeze", "Unsqueeze", "Reshape", "ToCopy")
# What is multiplied may be divided by the number of samples; what is stacked are losses.
_MAY_BE_MEAN = ("Mul", "Div", "Stack", "Cat", "Softmax")


class LossCheck:
    """Of the losses of one training."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_looked = False  # at numbers

    def look(self, loss: Any, samples: int, *, is_scaled: bool = False) -> None:
        """``samples``: of which it was made. ``is_scaled``: it was multiplied last, by a GradScaler.

        Raises:
            UserError: it is a sum over them.
        """
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            return
        for term in _terms(loss.grad_fn, is_scaled=is_scaled):
            if _is_sum(term, samples):
                raise UserError(
                    f"the loss is a sum over the samples ({_name(term)} with reduction='sum', or .sum()), and each worker's part of a batch is "
                    "weighed as a mean: divide it by the number of samples, or give reduction='mean'"
                )
            if not self._has_looked and (counted := _counted(term)):
                self._warn(
                    f"the loss is a mean over {counted} (class weights, or an ignore_index), and each worker's part of a batch is weighed by "
                    "its samples: it differs a little from that of one device (docs/plain_loop.md)"
                )
        self._has_looked = True


def _terms(node: Any, *, is_scaled: bool) -> Iterator[Any]:
    """The functions whose results are added to a loss."""
    if is_scaled and node.name().startswith("Mul"):
        node = node.next_functions[0][0]
    pending = [node]
    while pending:
        each = pending.pop()
        if each is None:
            continue
        if each.name().startswith(_PASSED):
            pending += [following for following, _ in each.next_functions]
        else:
            yield each


def _is_sum(node: Any, samples: int) -> bool:
    if hasattr(node, "_saved_reduction"):
        return bool(node._saved_reduction == SUM)
    if not node.name().startswith("SumBackward0") or samples < 2:
        return False
    within = node.next_functions[0][0]
    # Of a parameter, as in a penalty, the sum is no sum over samples.
    of_parameter = any(each is not None and "AccumulateGrad" in each.name() for each, _ in within.next_functions[:1])
    shape = node._saved_self_sym_sizes
    return bool(shape) and shape[0] == samples and not of_parameter and not within.name().startswith(_MAY_BE_MEAN)


def _counted(node: Any) -> str:
    """In words, over what it is a mean; empty if over all samples, or if that is not known."""
    if not hasattr(node, "_saved_total_weight") or node._saved_reduction == SUM:
        return ""
    counted, every = float(node._saved_total_weight), node._saved_target.numel()
    return "" if abs(counted - every) <= 1e-4 * every else f"{counted:.6g} of {every} targets"


def _name(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


NONE = (0, 0)  # no gradient


@dataclass(frozen=True, slots=True)
class Remedy:
    """What a script is told whose gradients are not those of weighed passes."""

    made_by: str  # what makes weighed ones
    changed: str = "after the step's last pass"  # where gradients are summed, and may be changed


STEP_IN_PASS = (
    "optimizer.step() was called within a backward pass, by a hook (register_post_accumulate_grad_hook), before the gradients of all workers are summed: "
    "call it after the pass"
)


class WeighedGradients:
    """Whether gradients were made in passes that are weighed, and not beside these: told without a look at numbers."""

    def __init__(self, remedy: Remedy | None, warn: Callable[[str], None] | None) -> None:
        """``remedy``: None if it makes no difference. ``warn``: see `LossCheck`; None: losses may be what they like."""
        self._remedy = remedy
        self._losses = None if warn is None else LossCheck(warn)
        self._parameters: list[torch.nn.Parameter] = []
        self._seen: list[tuple[int, int]] | None = None  # of them, after the last pass; None: no gradient
        self._is_expected = self._is_making = False  # a pass

    def begin(self, parameters: list[torch.nn.Parameter]) -> None:
        """A step begins, without gradients."""
        self._parameters, self._seen, self._is_expected = parameters, None, False

    def accept(self) -> None:
        """The gradients that are there are right."""
        self._is_expected = False
        if self._remedy is not None:
            self._seen = self._present()

    def expect(self) -> None:
        """The script makes the next pass by itself, of a loss that is weighed."""
        self.require()
        self._is_expected = True

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Within, a weighed pass is made.

        Raises:
            UserError: see `require`.
        """
        self.require()
        self._is_making = True
        try:
            yield
        finally:
            self._is_making = False
        self.accept()

    def look(self, loss: object, samples: int, *, is_scaled: bool = False) -> None:
        """A pass is to be made of this loss; see `LossCheck.look`."""
        if self._losses is not None:
            self._losses.look(loss, samples, is_scaled=is_scaled)

    def require(self) -> None:
        """Raises:
        UserError: gradients are there that were made otherwise, or a pass is not over yet.
        """
        if self._is_making:
            raise UserError(STEP_IN_PASS)
        if self._is_expected:
            self.accept()
        elif self._remedy is not None and (present := self._present()) != self._seen:
            self._require(present, self._seen or [NONE] * len(present), self._remedy)

    def _require(self, present: list[tuple[int, int]], seen: list[tuple[int, int]], remedy: Remedy) -> None:
        for parameter, now, before in zip(self._parameters, present, seen, strict=True):
            if now == before or parameter.grad is None or not bool(parameter.grad.any()):
                continue
            if before == NONE:
                raise UserError(
                    f"gradients were made otherwise than by {remedy.made_by}, as by torch.autograd.backward or `parameter.grad = ...`, and "
                    f"are not weighed by this worker's part of the batch: call {remedy.made_by}"
                )
            raise UserError(
                f"gradients were made otherwise than by {remedy.made_by}, or changed, as by clipping, before those of all workers are summed: "
                f"call {remedy.made_by}, and change them {remedy.changed}"
            )

    def _present(self) -> list[tuple[int, int]]:
        return [
            NONE if (gradient := each.grad) is None else (id(gradient), gradient._version) for each in self._parameters
        ]


# What a script has registered on parameters is called within each backward pass, on this worker's part of the gradient, as with
# DistributedDataParallel.

OF_PART = (
    "a hook on a parameter (register_hook) is given the gradient of this worker's part of a batch, weighed by its samples, as with "
    "DistributedDataParallel: a mask or a factor is right so; to clip, call clip_grad_value_ or clip_grad_norm_ before optimizer.step() instead"
)


class OwnHook:
    """One of ours, which sees when a gradient is there."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        self._see = see

    def __call__(self, parameter: torch.Tensor) -> None:
        self._see(parameter)


def has_hooks(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether a script has registered some."""
    every: list[dict[int, Any] | None] = []
    for each in parameters:
        every += each._backward_hooks, each._post_accumulate_grad_hooks
    return any(type(hook) is not OwnHook for hooks in every if hooks for hook in hooks.values())
