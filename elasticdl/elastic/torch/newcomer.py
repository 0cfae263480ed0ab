"""What can't be right on a worker that has come later, or where workers have come and gone, each in one line.

The others go on without a newcomer that raises on its way, or where it stands first.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from elasticdl.elastic.core.plan import MicroBatch
from elasticdl.elastic.torch.in_place import storage_of
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch
from elasticdl.elastic.torch_kit.participant.host import OpenBatch

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
        self.looked_at = ""  # the place in the script where it has looked at gradients last
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
