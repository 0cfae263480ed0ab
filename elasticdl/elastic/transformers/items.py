"""How many items, such as tokens, the global batches of a step have, by which a trainer divides the sum of their losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticdl.elastic.core.interruptions import WorldBroken
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch_kit.participant.host import OpenBatch
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

log = logging.getLogger(__name__)

Count = Callable[[list[Any]], Any]


class Items:
    """Counted over the workers."""

    def __init__(self, job: ElasticContext) -> None:
        self.total: Any = None  # of the step; None if the trainer does not count them
        self._job = job
        self._count: Count | None = None

    def of_step(self, samples: list[Any], open_batches: Sequence[OpenBatch], count: Count) -> Any:
        """``samples``: this worker's parts of the batches in hand, if there are any."""
        self._count = count
        items = count(samples)
        if items is None or not open_batches:
            return items
        if self._job.size > 1:
            items = self._sum(
                items, [each for each, given in zip(samples, open_batches, strict=True) if given.part.samples]
            )
        self.total = items
        return items

    def count_again(self, samples: list[Any]) -> None:
        """The batches were divided anew."""
        if self.total is not None:
            self.total = self._sum(self.total, samples)

    def _sum(self, like: Any, samples: list[Any]) -> Any:
        own = self._count(samples) if samples and self._count is not None else None
        total = torch.tensor([0.0 if own is None else float(own)], dtype=torch.float64)
        with self._job.waiting(Activity.COMPUTE):
            try:
                self._job.collective.sum_([total], "elasticdl.items")
            except WorldBroken as failure:
                log.info("items are counted again: %s", failure)  # as the step that follows is torn
                total.fill_(1.0)
        return total.to(like)[0] if torch.is_tensor(like) else float(total)
