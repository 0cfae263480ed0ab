"""Checks that model and loss take the first samples of the training data.

And the batches and rules of the rate that a specification asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of, one_line, shown
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy, equal_shares
from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import ModelModule, blame

# Batch sizes and rules for the learning rate, from the options of a job.

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


COUNT = 2
OF_A_DEVICE = re.compile(r"\b(CPU|CUDA|GPU)\b|not implemented for", re.IGNORECASE)

Attempt = Callable[[int, bool], object]  # with so many samples; whether as in training


def require_fit(attempt: Attempt, spec: JobSpec, samples: int) -> None:
    """Raises:
    UserError: model and loss don't take a batch of the training data.
    """
    _require_first(attempt, spec, samples)
    policy = batch_policy(spec)
    if not policy.fixed or samples <= policy.batch_size(1) or samples % policy.batch_size(1) != 1:
        return
    try:
        attempt(1, True)
    except UserError as error:
        if not _is_of_the_device(error.__cause__):
            raise UserError(
                f"the last batch of an epoch has one sample, as {samples} leave one over of batches of {policy.batch_size(1)}: "
                f"take another --global_batch_size; {error}"
            ) from error


def _require_first(attempt: Attempt, spec: JobSpec, samples: int) -> None:
    """Try few samples, as in an evaluation. What fails there counts if the worker's own first batch fails as well: some
    models take batches of one size only, or give what the loss needs only in training. What only another device than
    this one can do is not judged.
    """
    failure: UserError | None = None
    for count, training in ((min(COUNT, samples), False), (largest_micro_batch(spec, samples), True)):
        try:
            attempt(count, training)
        except UserError as error:
            failure = error
        else:
            return
        if _is_of_the_device(failure.__cause__):
            return
    assert failure is not None
    raise failure


def run_first(
    module: ModelModule,
    spec: JobSpec,
    load: Callable[[], tuple[Any, Any]],
    model: Callable[[Any], Any],
    loss: Callable[[Any, Any], Any],
) -> None:
    """One batch of the first samples through model and loss."""
    source = "--training_data" if spec.training_data else "dataset('training', '')"
    first = f"the first samples of {source}"

    def at(what: str) -> AbstractContextManager[None]:
        return blame(what, module.folder, otherwise=shown(module.path))

    with at(f"putting {first} into a batch"):
        inputs, labels = load()
    with at(f"{name_of(module.custom_model)}()'s model, given {first} (features {layout(inputs)}),"):
        outputs = model(inputs)
    given = f"labels {layout(labels)} and predictions {layout(outputs)}"
    with at(f"{name_of(module.loss)}(labels, predictions), given {given},"):
        loss(labels, outputs)


def layout(value: Any) -> str:
    """Types and shapes of the tensors in a value, by name where they have one."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {layout(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(layout, value)) + ")"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return type(value).__name__
    dtype = getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)}"


def _is_of_the_device(error: BaseException | None) -> bool:
    if error is None:
        return False
    unable = isinstance(error, NotImplementedError) or type(error).__name__ == "UnimplementedError"
    return unable or bool(OF_A_DEVICE.search(one_line(error)))
