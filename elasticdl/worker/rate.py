"""The learning rate of each step: the user's own, as the number of workers and the chosen rule make it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.common.spec import JobSpec
from elasticdl.elastic.learning_rate import Ramp, scale
from elasticdl.worker.ledger import Ledger

log = logging.getLogger(__name__)

Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """How the learning rate depends on epoch and number of workers.

    With a fixed global batch only the user's own schedule does anything: the batch stays, so the rate has to as well.
    """

    base: float  # of the optimizer's first parameter group
    schedule: Schedule | None
    rule: str  # none, linear or sqrt
    fixed_batch: bool
    ramp_steps: int

    def target(self, epoch: int, workers: int) -> float:
        """The rate for this epoch and number of workers, once a ramp is over. Calls the user's schedule."""
        value = self.base if self.schedule is None else float(self.schedule(epoch))
        return value if self.fixed_batch else value * scale(self.rule, workers)  # type: ignore[arg-type]


def rate_policy(spec: JobSpec, base: float, schedule: Schedule | None) -> RatePolicy:
    return RatePolicy(
        base=base,
        schedule=schedule,
        rule=spec.learning_rate_scaling,
        fixed_batch=spec.global_batch_size is not None,
        ramp_steps=spec.learning_rate_ramp_steps,
    )


class LearningRate:
    """The rate as training goes along; what a newcomer must know of the past is in the ledger."""

    def __init__(self, policy: RatePolicy, ledger: Ledger) -> None:
        self._policy = policy
        self._ledger = ledger
        self._target = policy.base

    def enter(self, epoch: int, workers: int, step: int) -> None:
        """An epoch begins or the world has changed, ``step`` steps having been made."""
        ledger = self._ledger
        self._target = self._policy.target(epoch, workers)
        if ledger.workers not in (0, workers) and ledger.learning_rate and self._target:
            ledger.ramp_start = ledger.learning_rate / self._target
            ledger.ramp_step = step
        ledger.workers = workers

    def at(self, step: int) -> float:
        """The rate for the step with this number."""
        ramp = Ramp(self._ledger.ramp_start, 1.0, self._ledger.ramp_step, self._policy.ramp_steps)
        return self._target * ramp.at(step)


def double_correction(policy: RatePolicy, pretended: float, actual: float) -> str | None:
    """A warning if the rate is corrected twice for the number of workers.

    ``pretended`` and ``actual``: what the schedule gives with one worker more, and as it is.
    """
    if pretended == actual:
        return None
    if policy.fixed_batch:
        return (
            "the LearningRateScheduler's function multiplies by the number of workers, while --global_batch_size keeps "
            "the batch fixed: the learning rate is corrected for a growth that does not happen; use --minibatch_size, "
            "or take the number of workers out of the function"
        )
    if policy.rule != "none":
        return (
            f"the LearningRateScheduler's function multiplies by the number of workers, and --learning_rate_scaling "
            f"{policy.rule} does so again: leave one out"
        )
    return None
