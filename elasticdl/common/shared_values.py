"""Values that master and worker tell each other, and both cores hold as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a world, where it stood when it asked for it; its place in the world's list is its rank."""

    worker_id: int
    host: str
    step: int
    has_state: bool
    epoch: int = 0
    synced_in: int = 0  # version of the world in which it last stood where rank 0 stood


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step on one global batch. ``loss`` is the mean over it; ``seconds`` since the step before."""

    step: int
    epoch: int
    loss: float
    samples: int
    learning_rate: float
    seconds: float
    world_version: int
    total_samples: int  # since the first step of the model
    ends_epoch: bool
