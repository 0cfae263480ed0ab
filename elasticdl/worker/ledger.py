"""What has been done once and must not be done again, whichever worker did it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Ledger:
    """Part of the training state: committed with each step, sent to newcomers, kept in checkpoints.

    Whether something is due is decided from this and the step alone, so that all members decide alike, and alike again
    when they come back to the same point after a change of workers.
    """

    evaluated_step: int = 0
    checkpointed_step: int = 0
    finished_epochs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    loss_sum: float = 0.0  # over the samples of the present epoch
    loss_samples: int = 0
    # For the ramp of the learning rate: what held in the last step, and the factor a change of workers began with.
    learning_rate: float = 0.0
    workers: int = 0
    ramp_start: float = 1.0
    ramp_step: int = 0

    def add_loss(self, loss: float, samples: int) -> None:
        self.loss_sum += loss * samples
        self.loss_samples += samples

    @property
    def epoch_loss(self) -> float:
        return self.loss_sum / self.loss_samples if self.loss_samples else float("nan")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
