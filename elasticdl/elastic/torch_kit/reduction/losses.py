"""Whether a loss is a mean over the samples, as far as the functions tell that have made it.

A worker's part of a batch is weighed by its samples. So a sum over samples is refused, and a mean over something else than samples
(by class weights, or without what is to be ignored) is warned of. What it is otherwise nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from elasticdl.common.errors import UserError

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
