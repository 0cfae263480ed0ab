"""Where in the job the first loop of a worker's script is: at its top, or where a checkpoint of the script's own was written.

A checkpoint is known by a mark: the norm of the trained parameters, which each step changes. A job has one for the beginning of each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from elasticdl.common.errors import UserError

Moved = tuple[int, float]
_CLOSE = 1e-3
_EQUAL = 1e-12  # sums in double precision may be added up in another order


def moved(optimizers: Iterable[torch.optim.Optimizer]) -> Moved:
    """Of what optimizers keep for each parameter: how many tensors, and their norm. None before the first step."""
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    tensors = [each for each in states if isinstance(each, torch.Tensor)]
    return len(tensors), _norm(tensors)


def mark_of(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Of the parameters that are trained: one number, another one after each step."""
    return _norm(each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    # One after the other: in double precision all of them may be more than the memory holds.
    kept = (each.detach().to(torch.complex128 if each.is_complex() else torch.float64) for each in tensors)
    return math.hypot(*(float(torch.linalg.vector_norm(each.to_dense())) for each in kept))


class Beginning:
    """With what a script's loop begins: the optimizers as they were given to `elastic.prepare`.

    A script may go on from a checkpoint of its own. On a worker that comes later that may be one which the job has written since.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.moved = moved(optimizers)
        self._mark = mark_of(optimizers)

    def epoch(self, marks: Mapping[int, float]) -> int:
        """Of the job, which the first loop of the script is: 0, unless the script has read what the job has written.

        Args:
            marks: of the job, `mark_of` at the beginning of its epochs.

        Raises:
            UserError: it may be one of several, between which the parameters have not changed.
        """
        epoch, *others = self._like(marks) or [0]
        if epoch and others:
            raise UserError(
                f"the script has read the parameters that this job had after epoch {epoch} and still had after epoch {others[-1]}, as with a "
                "learning rate of 0, so nobody knows with which epoch its loop begins: a worker can come later once a step has changed them and "
                "the script has written that"
            )
        return epoch

    def is_newer(self, marks: Mapping[int, float]) -> bool:
        """Whether the script has read what was written since, such as before an evaluation that still lasts."""
        return self.moved[0] > 0 and 0 in marks and not self._like(marks)

    def _like(self, marks: Mapping[int, float]) -> list[int]:
        return [epoch for epoch, each in sorted(marks.items()) if math.isclose(self._mark, each, rel_tol=_EQUAL)]

    def require_states(self, epoch: int, jobs: Moved) -> None:
        """``jobs``: as the job's optimizers are at present.

        Raises:
            UserError: the script has read parameters alone, and may begin at its top nevertheless.
        """
        if jobs[0] and not self.moved[0]:
            raise UserError(
                f"the script has read the parameters that this job had after epoch {epoch}, and not the optimizer's state, so nobody knows "
                "with which epoch its loop begins: write and read optimizer.state_dict(), too, or read only what an earlier job has written"
            )

    def require_top(self, jobs: Moved) -> None:
        """``jobs``: as the one did that has begun the job.

        Raises:
            UserError: the script has read a checkpoint since, and its loop begins elsewhere.
        """
        if self.moved[0] == jobs[0] and math.isclose(self.moved[1], jobs[1], rel_tol=_CLOSE, abs_tol=1e-12):
            return
        raise UserError(
            "elastic.prepare() was given another optimizer's state than where the job began: the script goes on from a checkpoint that "
            "was written since, within an epoch or long ago. A worker that comes later is sent the job's state: write such a checkpoint at "
            "the end of an epoch, with all optimizers, or read only what an earlier job has written, under another name. After `elasticdl "
            "stop` the job goes on from what was kept: give --no_resume if the script's own checkpoint is to count"
        )
