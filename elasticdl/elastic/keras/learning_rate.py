"""Setting the learning rate of a Keras optimizer."""

from __future__ import annotations

from typing import Any

import keras

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.learning_rate import LearningRate, RateControl
from elasticdl.elastic.core.world import World


class OptimizerRate(RateControl):
    """Sets an optimizer's rate, which the traced functions read from its variable. Without rules it is left alone."""

    def __init__(self, optimizer: Any, rules: LearningRate, *, fixed_batch: bool) -> None:
        """Raises:
        UserError: the rules do not fit the batch policy, or the optimizer has a schedule of its own beside them.
        """
        self._optimizer = optimizer
        self._has_rules = rules.schedule is not None or rules.scaling is not None
        if self._has_rules and not isinstance(optimizer.learning_rate, keras.Variable):
            raise UserError(
                f"the learning rate of {optimizer.name} is a schedule of the optimizer's own, which can't be combined with "
                "a scheduling callback or scaling by workers: give the optimizer a number"
            )
        super().__init__(rules, float(optimizer.learning_rate), fixed_batch=fixed_batch)

    def set(self, step: int, epoch: int, world: World) -> None:
        """Set the rate for the step with this number."""
        rate = self.at(step, epoch, world)
        if self._has_rules and rate != float(self._optimizer.learning_rate):
            self._optimizer.learning_rate = rate
