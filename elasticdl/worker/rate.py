"""The rules of the learning rate that options and callbacks mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.core.learning_rate import LearningRate


def rate_rules(
    spec: JobSpec, callbacks: Iterable[Callback], schedule: Callable[[int], float] | None = None
) -> LearningRate:
    """Of several `LearningRateScheduler`s the last one counts, unless a schedule is given."""
    schedules = [callback.schedule for callback in callbacks if isinstance(callback, LearningRateScheduler)]
    rule = spec.learning_rate_scaling
    return LearningRate(
        schedule or (schedules[-1] if schedules else None),
        scaling=None if rule == "none" else rule,
        ramp_steps=spec.learning_rate_ramp_steps,
    )
