"""What has been done once and must not be done again, whichever worker did it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Ledger:
    """Part of the training state: sent to newcomers, kept in checkpoints, and committed with steps only.

    Whether something is due is decided from this and the step alone, so that all members decide alike, and alike again
    when they come back to the same point after a change of workers. As it is committed with steps only, members that
    stand after the same step have the same ledger: one that got through an evaluation in which another lost the world
    forgets it, and both do it again.
    """

    evaluation: dict[str, Any] = field(default_factory=dict)  # the last one: step, epoch, samples, metrics
    checkpointed_step: int = 0
    finished_epochs: int = 0
    loss_sum: float = 0.0  # over the samples of the present epoch
    loss_samples: int = 0
    epoch_steps: int = 0  # of the present epoch

    @property
    def evaluated_step(self) -> int:
        return int(self.evaluation.get("step", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation; empty before the first."""
        return dict(self.evaluation.get("metrics", {}))

    def add_loss(self, loss: float, samples: int) -> None:
        self.loss_sum += loss * samples
        self.loss_samples += samples
        self.epoch_steps += 1

    def begin_epoch(self) -> None:
        self.loss_sum, self.loss_samples, self.epoch_steps = 0.0, 0, 0

    @property
    def epoch_loss(self) -> float:
        return self.loss_sum / self.loss_samples if self.loss_samples else float("nan")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
