"""Batch sizes and rules for the learning rate, from the options of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy, equal_shares
from elasticdl.job.spec import JobSpec

DEFAULT_MINIBATCH = 64


def batch_policy(spec: JobSpec) -> BatchPolicy:
    """Fixed global batch or fixed batch per worker, as the options have it."""
    worker_batch = None if spec.global_batch_size else spec.minibatch_size or DEFAULT_MINIBATCH
    return BatchPolicy(spec.global_batch_size, worker_batch, spec.max_worker_batch_size)


def largest_micro_batch(spec: JobSpec, samples: int) -> int:
    """The most samples that a worker will run through the model at once."""
    policy = batch_policy(spec)
    share = equal_shares(policy.batch_size(1), spec.num_workers.minimum if policy.fixed else 1)[0]
    return min(share, policy.max_micro_batch or share, samples)


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
