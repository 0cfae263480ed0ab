"""The state of a pass over data that trains nothing: the position, and the model that every member has.

A step gives each member one part of the data (`elasticdl.elastic.core.plan.PartOrder`). It is closed by a vote, as a step of training is. What a
member makes of its part it must have put away before: whoever makes the part again after a torn step puts away the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elasticdl.elastic.core.plan import PartOrder
from elasticdl.elastic.core.training_step import ENDED, LEAVING, LOSS, SAMPLES, VOTE_SIZE, Vote, mark
from elasticdl.elastic.training.cursor import Ordered
from elasticdl.elastic.training.data_facts import Source
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.pieces import Piece, Settings, Tensors
from elasticdl.elastic.training.state import TrainingState


class NoSettings(Settings):
    """There is no optimizer."""

    rate = 0.0

    def dump(self) -> None: ...

    def load(self, dumped: None) -> None: ...

    def told(self) -> Mapping[str, Any]:
        return {}

    def own_rate(self) -> float:
        return self.rate

    def set_rate(self, rate: float) -> None: ...


class InferenceState(TrainingState):
    """See `TrainingState`."""

    _remedy = "close each step once"

    def __init__(
        self, job: JobContext, tensors: Tensors, role: str, data: Any, model: Sequence[Piece], values: dict[str, Any]
    ) -> None:
        """``role``: of the data. ``model``: its pieces."""
        cursor = Ordered(job, len(data), shuffle=False)
        cursor.order = PartOrder(len(data), job.policy, shuffle=False)
        super().__init__(job, tensors, NoSettings(), cursor, values)
        self.cursor, self.model, self.host_array = cursor, model, tensors.host_array
        self.sources.append(Source.of(role, data))
        self._hold(*model)

    @property
    def origin(self) -> dict[str, Any]:
        return {**super().origin, "part": self._job.policy.batch_size(1)}

    def oversight(self) -> str:
        return ""  # a script's evaluation makes no step

    def close_step(self, samples: int, loss: float) -> float:
        """``loss``: the sum over so many samples of this member. Returns the mean over those of all.

        Raises:
            WorldBroken: the step is torn.
            UserError: the members have different data, or different models.
        """
        batch = self.cursor.current
        assert batch is not None, "a step is closed within the loop over its batches"
        checksums = self._check.ballot(batch.plan)
        self._voted(self._sum(checksums, {SAMPLES: samples, LOSS: loss}))
        self._step_made()
        return self.loss

    def _cast_end_vote(self, state: int) -> Vote:
        return self._sum((0, state), {ENDED: 1.0})

    def _sum(self, checksums: tuple[int, int], numbers: Mapping[int, float]) -> Vote:
        ballot = [0.0] * VOTE_SIZE
        mark(ballot, *checksums)
        ballot[LEAVING] = float(self._job.leaving)
        for place, number in numbers.items():
            ballot[place] = number
        with self._job.waiting():
            return Vote.of(self._job.collective.sum(np.array(ballot), "elasticdl.step").tolist())
