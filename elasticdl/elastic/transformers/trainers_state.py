"""What a trainer of Hugging Face and its callbacks hold, and of which batches its steps make gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.participant.host import OpenBatch
from elasticdl.elastic.torch_kit.pieces.model_attributes import Holder, holders_of_callbacks
from elasticdl.elastic.torch_kit.reduction.rides import Rides
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.attributes import set_by

PACKAGES = ("transformers", "accelerate", "elasticdl")
DIFFER = (
    "training_step made gradients of a batch on some workers and none on others, as it went by what is in this worker's part: go by the step "
    "or the epoch, or give the batch to accelerator.backward on all workers, its loss multiplied by zero where it is not to count"
)


class Passed:
    """Of the batches of a step, of which this worker has made gradients, and of which it has not: all workers alike, or the job ends with one line.

    Asked of all workers only where ``training_step`` is not transformers' own, which always does.
    """

    def __init__(self, job: ElasticContext, trainer: Any) -> None:
        self.made = False  # in the present pass
        self._job = job
        self._may_skip = any(
            "training_step" in vars(kind) and not kind.__module__.startswith(("transformers.", __package__ or ""))
            for kind in type(trainer).__mro__
        )
        self._batches = int(trainer.args.gradient_accumulation_steps)
        self._numbers: dict[int, int] = {}  # of batches in the step, by their numbers in the epoch
        self.begin()

    def begin(self) -> None:
        """A step begins, or is begun again."""
        self.made = False
        self._numbers = {}
        self._found = torch.zeros(self._batches, 2, dtype=torch.float64)

    def note(self, given: OpenBatch) -> None:
        """A pass was made of a part of this batch."""
        made, self.made = self.made, False
        number = self._numbers.setdefault(given.batch.number, len(self._numbers))
        if given.part.samples:  # else it is another worker's
            self._found[number, int(made)] = 1.0

    def rides(self) -> dict[str, torch.Tensor]:
        """What the other workers are told with the step's gradients."""
        return {"passes": self._found} if self._may_skip and self._job.size > 1 else {}

    def heard(self, rides: Rides) -> None:
        """Raises:
        UserError: workers differ.
        """
        if self._may_skip and self._job.size > 1 and bool(rides["passes"].all(axis=1).any()):
            raise UserError(DIFFER)


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The trainer, as far as it is not transformers', and the callbacks that are not."""
    kind: Any = type(trainer)
    yield Holder("trainer", "the trainer", trainer, set_by(kind, PACKAGES))
    yield from holders_of_callbacks(
        trainer.callback_handler.callbacks, PACKAGES, "make the callback an ExportableState"
    )
