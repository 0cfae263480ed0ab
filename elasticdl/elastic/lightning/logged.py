"""What a script logs in its training step: of this worker's part of a batch, made that of the global batch.

``self.log`` ends in ``update_metrics`` of the training loop's results. If there are several workers, what a training step logs is only noted
there. It is summed over the workers with the gradients, and logged once the step is certain. So the results are the same on all
workers between two steps, and a step that is torn leaves no trace in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticdl.elastic.lightning import private
from elasticdl.elastic.torch_kit.participant import OpenBatch
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.tensors import ElasticContext, HostCopy

SUMMED = ("mean", "sum")
OBJECTS = "a torchmetrics object that is logged in training_step counts this worker's parts of the batches only: log values there"


@dataclass(frozen=True, slots=True)
class Part:
    """What the training step runs on: of ``loaded`` samples so many count, and they are so much of the global batch."""

    weight: float
    loaded: int
    samples: int


@dataclass(slots=True)
class Value:
    """What was logged of the parts of a batch that this worker has."""

    key: str
    is_mean: bool
    # With the size that Lightning has of the batch.
    parts: list[tuple[HostCopy, float, Part]] = field(default_factory=list)

    def numbers(self) -> tuple[float, float]:
        """Summed over the workers, those of the global batch."""
        counted = [(float(copy.wait()), size, part) for copy, size, part in self.parts if part.samples]
        value = sum(each * (part.weight if self.is_mean else 1.0) for each, _, part in counted)
        # By its own number of samples, or by one that the script has given for the whole batch.
        return value, sum(part.samples if size == part.loaded else size * part.weight for _, size, part in counted)


@dataclass(slots=True)
class GivenBatch(OpenBatch):
    index: int = 0  # as the training step is told
    asked: int = 0  # of the workers' answers, before the training step
    logged: dict[str, Value] = field(default_factory=dict)  # by the names under which they ride
    left_out: int = 0  # samples of this worker's part for which the training step has returned None


class Logged:
    """The results of the training loop, by key."""

    def __init__(self, job: ElasticContext, trainer: Any) -> None:
        self._job = job
        self._module = trainer.lightning_module
        self._results: Any = private.results_of(trainer)
        self._log = self._results.update_metrics
        self._results.update_metrics = self._note
        self._pending: dict[
            str, private.Accumulators
        ] = {}  # the job's, of keys that this worker's script has not logged yet
        self._running: tuple[GivenBatch, Part] | None = None  # while a training step does
        self._times: dict[str, int] = {}  # that it has logged a key before
        self._found: list[tuple[str, float, float]] = []  # of the step: key, value and size, over all workers
        self._warnings: set[str] = set()  # that were given

    def end(self) -> None:
        vars(self._results).pop("update_metrics", None)

    # -- in the training step --

    @contextlib.contextmanager
    def collecting(self, given: GivenBatch, part: Part) -> Iterator[None]:
        """Within, the training step runs on this part of a batch."""
        self._running, self._times = (given, part), {}
        try:
            yield
        finally:
            self._running = None

    def _note(self, key: str, value: Any, size: int) -> None:
        metric = self._results[key]
        if key in self._pending:
            private.put_accumulators(metric, self._pending.pop(key))
        if self._running is None or not self._is_summed(metric):
            self._log(key, value, size)
            return
        given, part = self._running
        times = self._times[key] = self._times.get(key, 0) + 1
        is_mean = metric.meta.reduce_fx.__name__ == "mean"
        noted = given.logged.setdefault(f"{key} ({given.index}.{times})", Value(key, is_mean))
        noted.parts.append((HostCopy(value.detach()), size, part))

    def _is_summed(self, metric: Any) -> bool:
        """What is not, is this worker's own, and is named once."""
        if not metric.is_tensor:
            self._warn(OBJECTS)
        elif metric.meta.sync.rank_zero_only:
            return False
        elif metric.meta.reduce_fx.__name__ in SUMMED:
            return True
        else:
            self._warn(
                f"the largest or smallest {metric.meta.name!r} is that of each worker's part of a batch: log a mean, or a sum"
            )
        return False

    # -- with the gradients --

    def rides(self, open_batches: Sequence[GivenBatch]) -> dict[str, tuple[float, float]]:
        """To be summed over the workers, which have logged the same keys."""
        return {name: value.numbers() for given in open_batches for name, value in given.logged.items()}

    def heard(self, rides: Rides, open_batches: Sequence[GivenBatch]) -> None:
        every = (each for given in open_batches for each in given.logged.items())
        self._found = [(value.key, *rides[name].tolist()) for name, value in every]

    def apply(self) -> None:
        """The step is made: what was found is what the script has logged."""
        found, self._found = self._found, []
        if not found:
            return
        with private.in_training_step(self._module):
            for key, value, size in found:
                like = self._results[key].value
                samples = round(size) if abs(size - round(size)) < 1e-6 else size
                self._log(key, torch.tensor(value, dtype=like.dtype, device=like.device), samples)

    # -- as a part of the training state --

    def dump(self) -> dict[str, private.Accumulators]:
        """Accumulators of the epoch."""
        held = {
            key: private.accumulators_of(metric)
            for key, metric in self._results.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }
        return {**self._pending, **held}

    def load(self, accumulators: dict[str, private.Accumulators]) -> None:
        for metric in self._results.values():
            if metric.is_tensor:
                metric.reset()
        self._pending = dict(accumulators)
        for key in self._results.keys() & self._pending.keys():
            private.put_accumulators(self._results[key], self._pending.pop(key))

    # -- details --

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            self._job.warn(message)
