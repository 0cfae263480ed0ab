"""Means over the global batch that a plain loop asks for, of what it has made of a worker's part."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

import torch

from elasticdl.elastic.torch.replay import NotedBatch
from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.torch_job import ElasticContext, sum_of_all

OF_BEFORE = "is of the samples before a worker was lost if it is of that batch: give it one from before loss.backward()"


class Means:
    """All workers ask for the same ones, in the same order."""

    def __init__(self, job: ElasticContext) -> None:
        # The script's, of the last step, if that was made of one.
        self.steps_loss: ReferenceType[torch.Tensor] | None = None
        self._job = job

    def of(self, value: Any, own: float, participant: Participant, given: NotedBatch | None) -> float:
        """``own``: the value over this worker's part of the batch that was ``given`` last."""
        if given is not None and given.remade and given.remade.get(value) is None and self._job.rank == 0:
            self._job.warn(f"an elastic.mean() at step {participant.state.step} {OF_BEFORE}")
        vote, loss = participant.state.vote, self.steps_loss
        if participant.is_reduced and given is not None and len(participant.open_batches) == 1:
            loss = given.loss
        if loss is not None and value is loss() and vote is not None:
            return vote.loss
        # Of a step that this worker has made again alone, ``own`` is of a part.
        if self._job.size == 1 and not participant.is_torn:
            return given.weighed(value, own) if given is not None and given.remade else own

        def tell() -> float:
            mine = _part_of(value, own, participant, given)
            return mine if self._job.size == 1 else sum_of_all(self._job, mine)  # of one by now, perhaps

        about = f"an elastic.mean() after step {participant.state.step}"
        return float(participant.agreements.agree(tell, own, alone=about) or 0.0)


def _part_of(value: Any, own: float, participant: Participant, given: NotedBatch | None) -> float:
    """What this worker adds to the mean over the batch."""
    if given is None or not participant.is_torn:
        return given.weighed(value, own) if given else 0.0
    pieces = [piece for piece in participant.pieces(given) if piece.weight]
    participant.seed(given.batch)
    made = sum(given.tape.remake_number(value, piece.content) * piece.weight for piece in pieces)
    participant.state.reset_buffers()
    return made
