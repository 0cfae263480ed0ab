"""The training state of a Keras model."""

from __future__ import annotations

from typing import Any


class KerasState:
    """INTERFACE (being filled in); the surface of `TorchState`: model, optimizer, loader, sampler, rate, values,
    progress, has_state, vote, step, loss, learning_rate, follow(rules), standing, commit, restore, sync,
    state_dict() -> {"model": {path: array}, "optimizer": {path: array}, "values", "progress", "rate"}, load_state_dict.

    Made by ``context.state(step: TrainStep, loader, values)``.
    """

    def make_step(self, batch: Any) -> float:
        """All micro-batches of this worker, the reduction and the update; returns the mean loss of the global batch.

        Raises:
            WorldBroken: the step is torn; model and optimizer are untouched.
        """
        raise NotImplementedError
