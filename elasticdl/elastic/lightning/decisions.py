"""What the scripts of all workers ask each other: rank 0's decisions, means, and whether anybody wishes to stop."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.torch_job import ElasticContext


class Decisions:
    """Each is one small collective, which the scripts of all workers call alike."""

    def __init__(self, job: ElasticContext) -> None:
        self.participant: Participant | None = None  # while this worker calls what the others call
        self.is_manual = False  # the optimization
        self._job = job

    def of_first(self, value: Any) -> Any:
        """Rank 0's value, on all workers."""

        def tell() -> Any:
            return pickle.loads(self._job.collective.broadcast_bytes(pickle.dumps(value), "elasticdl.decision"))

        return self._agreed("a decision", tell, value)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the workers."""
        if not torch.is_floating_point(tensor):
            return tensor

        def tell() -> torch.Tensor:
            total = tensor.detach().cpu().double() / self._job.size
            self._job.collective.sum_asked(total, "a mean (sync_dist=True)")
            return total.to(tensor.dtype)

        found: torch.Tensor = self._agreed("a mean", tell, tensor)
        return found.to(tensor.device)  # of another worker it may be known

    def anybody(self, wish: bool) -> bool | None:
        """Whether any worker wishes it; None: the world has broken, and the answer comes when it is asked again."""
        participant = self.participant
        if participant is None:
            return wish
        is_behind = participant.is_catching_up and (self._job.size > 1 or participant.is_torn)
        own = wish and not is_behind  # what it has seen is not the job's
        told = wish and not self._job.is_told_to_leave
        answer = participant.agreements.any_of([told], "the question whether to stop", [own])
        return None if answer is None else answer[0]

    def _agreed(self, what: str, tell: Callable[[], Any], own: Any) -> Any:
        if self.participant is None:
            return own
        # A training step that is manual is begun again.
        return self.participant.agreements.agree(tell, own, mends=not self.is_manual, alone=what)
