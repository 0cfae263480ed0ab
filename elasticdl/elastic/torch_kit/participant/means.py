"""Means over the global batch that a plain loop asks for, of what it has made of a worker's part."""

from __future__ import annotations

from typing import Any

import torch

from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.torch_kit.participant.loop_state import OpenBatch
from elasticdl.elastic.torch_kit.participant.steps import Steps
from elasticdl.elastic.torch_kit.torch_job import ElasticContext, sum_of_all


class Means:
    """All workers ask for the same ones, in the same order."""

    def __init__(self, job: ElasticContext) -> None:
        self.steps_loss: torch.Tensor | None = None  # the script's, of the last step, if that was made of one
        self._job = job

    def of(self, value: Any, own: float, steps: Steps, given: OpenBatch | None) -> float:
        """``own``: the value over this worker's part of the batch that was ``given`` last."""
        if self._job.size == 1 and not steps.is_torn:
            return own
        vote, open_batches = steps.state.vote, steps.open_batches
        loss = open_batches[0].loss if steps.is_reduced and len(open_batches) == 1 else self.steps_loss
        if value is loss and vote is not None:
            return vote.loss
        if open_batches and not steps.is_reduced:
            answer = steps.ask(lambda: self._sum(_part_of(value, own, steps, given)))
            return own if answer is None else float(answer)
        try:
            return self._sum(_part_of(value, own, steps, given))
        except WorldBroken as failure:  # what the lost worker would have added nobody knows
            self._job.warn(
                f"an elastic.mean() after step {steps.state.step} is of each worker's own samples: {failure}"
            )
            steps.place.answers.has_own = True
            return own

    def _sum(self, mine: float) -> float:
        """Over all workers.

        Raises:
            WorldBroken: a worker is lost.
        """
        if self._job.size == 1:  # by now, perhaps
            return mine
        return sum_of_all(self._job, mine)


def _part_of(value: Any, own: float, steps: Steps, given: OpenBatch | None) -> float:
    """What this worker adds to the mean over the batch."""
    if given is None or not steps.is_torn:
        return given.weighed(value, own) if given else 0.0
    pieces = [piece for piece in steps.pieces(given) if piece.weight]
    steps.seed(given.batch)
    made = sum(given.tape.remake_number(value, piece.content) * piece.weight for piece in pieces)
    steps.state.reset_buffers()
    return made
