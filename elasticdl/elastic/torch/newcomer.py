"""What can't be right on a worker that has come later, or where workers have come and gone, each in one line.

The others go on without a newcomer that raises on its way, or where it stands first.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import MicroBatch
from elasticdl.elastic.torch.in_place import storage_of
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch
from elasticdl.elastic.torch_kit.participant.host import OpenBatch

Moved = tuple[int, float]
_CLOSE = 1e-3

ON_ITS_WAY = (
    "raised on a worker that was catching up, on a stand-in for a batch (elastic.catching_up() is True; it has samples of the first batch of "
    "the epoch, and the model's answer from memory): leave out there what needs real ones (docs/plain_loop.md, When a worker joins)"
)


def resized(before: int, now: int) -> str:
    return (
        f"the number of workers has changed, and this worker's part of a batch from {before} to {now} samples: what a loop keeps of the "
        "samples of a batch for the next one, such as the hidden state of an RNN, no longer fits; make it anew where its size is another"
    )


class Hints:
    """What may be behind an exception that the script raises."""

    def __init__(self) -> None:
        self._resized = ""  # with the batch that was given last
        self._of_stand_ins: list[torch.Tensor] = []  # the model's last answer on the way, until a step is made

    def arrived(self, answer: list[torch.Tensor]) -> None:
        self._of_stand_ins = answer

    def given(self, batch: GlobalBatch, part: MicroBatch, last: OpenBatch | None) -> None:
        if last is None:
            return
        now, is_next = len(part.indices), last.batch.epoch == batch.epoch
        changes = is_next and last.most != now and len(last.batch.indices) == len(batch.indices)
        self._resized = resized(last.most, now) if changes else ""

    def step_made(self) -> None:
        self._of_stand_ins = []

    @property
    def kept(self) -> Container[int]:
        """Storages of what was computed on the way."""
        return {storage_of(each) for each in self._of_stand_ins}

    def about(self, *, on_its_way: bool) -> str:
        return ON_ITS_WAY if on_its_way else self._resized


def moved(optimizers: Iterable[torch.optim.Optimizer]) -> Moved:
    """Of what optimizers keep for each parameter: how many tensors, and their norm. None before the first step."""
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    tensors = [each.detach() for each in states if isinstance(each, torch.Tensor)]
    norms = [float(torch.linalg.vector_norm(each.double().to_dense())) for each in tensors if not each.is_complex()]
    return len(tensors), math.hypot(*norms)


def require_one_begin(ours: Moved, jobs: Moved) -> None:
    """``ours``: the optimizers as the script has given them to `elastic.prepare`. ``jobs``: as the one did that has begun the job.

    Raises:
        UserError: the script has read a checkpoint since, and its loop begins elsewhere.
    """
    if ours[0] != jobs[0] or not math.isclose(ours[1], jobs[1], rel_tol=_CLOSE, abs_tol=1e-12):
        raise UserError(
            "elastic.prepare() was given another optimizer's state than where the job began: the script goes on from a checkpoint that was "
            "written since, so that its loop begins in another epoch. A worker that comes later is sent the job's state, and a job that "
            "was stopped goes on from what was kept: read a checkpoint of an earlier job only, under a name that this job does not write, "
            "or give --no_resume if the script's own checkpoint is to count"
        )
