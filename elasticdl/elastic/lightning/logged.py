"""What a script logs in its training step: of this worker's part of a batch, made that of the global batch.

``self.log`` ends in ``update_metrics`` of the training loop's results. If there are several workers, what a training step logs is only noted
there. It is summed over the workers with the gradients, and logged once the step is certain. So the results are the same on all
workers between two steps, and a step that is torn leaves no trace in them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.elastic.core.training_step import SIZE, all_equal, summands
from elasticdl.elastic.lightning import private
from elasticdl.elastic.torch_kit.participant import OpenBatch
from elasticdl.elastic.torch_kit.tensors import ElasticContext, HostCopy

Table = npt.NDArray[np.float64]
Name = tuple[str, int]  # a key, and how often the training step has logged it before
NUMBERS = 2  # that are summed for a name: its value, and the samples that it stands for
SUMMED = ("mean", "sum")
DIFFERENT = (
    "the workers log different keys in training_step, and each its own values: let self.log not depend on the batch"
)
OBJECTS = "a torchmetrics object that is updated in training_step counts this worker's parts of the batches only: log values there"


@dataclass(frozen=True, slots=True)
class Part:
    """What the training step runs on: of ``loaded`` samples so many count, and they are so much of the global batch."""

    weight: float
    loaded: int
    samples: int


@dataclass(slots=True)
class Value:
    """What was logged by one name, of the parts of a batch that this worker has."""

    is_mean: bool
    parts: list[tuple[HostCopy, float, Part]] = field(
        default_factory=list
    )  # with the size that Lightning has of the batch

    def numbers(self) -> tuple[float, float]:
        """Summed over the workers, those of the global batch."""
        counted = [(float(copy.wait()), size, part) for copy, size, part in self.parts if part.samples]
        value = sum(each * (part.weight if self.is_mean else 1.0) for each, _, part in counted)
        # By its own number of samples, or by one that the script has given for the whole batch.
        return value, sum(part.samples if size == part.loaded else size * part.weight for _, size, part in counted)

    def own(self) -> tuple[float, float]:
        """As if these parts were the batch."""
        value, size = self.numbers()
        return (value / (sum(part.weight for *_, part in self.parts) or 1.0) if self.is_mean else value), size


@dataclass(slots=True)
class GivenBatch(OpenBatch):
    index: int = 0  # as the training step is told
    asked: int = 0  # of the workers' answers, before the training step
    logged: dict[Name, Value] = field(default_factory=dict)
    has_no_loss: bool = False  # the training step has returned None for this worker's part
    is_left_out: bool = False  # it has done so for some worker's


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
        self._objects: list[Any] | None = None  # of torchmetrics, in the module; none once it was warned of them
        self._part: tuple[Part, dict[Name, Value], dict[str, int]] | None = None  # while a training step runs
        self._found: list[tuple[Name, tuple[float, float]]] = []  # of the step, over all workers
        self._agreed: tuple[Name, ...] = ()  # that all members of the world have logged for each batch of the last step
        self._version = -1  # of that world
        self._warnings: set[str] = set()  # that were given

    def end(self) -> None:
        vars(self._results).pop("update_metrics", None)

    # -- in the training step --

    @contextlib.contextmanager
    def collecting(self, into: dict[Name, Value], part: Part) -> Iterator[None]:
        """Within, the training step runs on this part."""
        updates, self._part = self._updates(), (part, into, {})
        try:
            yield
        finally:
            self._part = None
        if self._updates() != updates:
            self._warn(OBJECTS)
            self._objects = []

    def _note(self, key: str, value: Any, size: int) -> None:
        metric = self._results[key]
        if key in self._pending:
            private.put_accumulators(metric, self._pending.pop(key))
        kind, is_own = metric.meta.reduce_fx.__name__, not metric.is_tensor or metric.meta.sync.rank_zero_only
        if self._part is None or is_own or kind not in SUMMED:
            if self._part is not None and not is_own:
                self._warn(
                    f"the largest or smallest {metric.meta.name!r} is that of each worker's part of a batch: log a mean, or a sum"
                )
            self._log(key, value, size)
            return
        part, into, seen = self._part
        seen[key] = number = seen.get(key, -1) + 1
        noted = into.setdefault((key, number), Value(kind == "mean"))
        noted.parts.append((HostCopy(value.detach()), size, part))

    # -- with the gradients --

    def ride(self, open_batches: Sequence[GivenBatch]) -> Table:
        """To be summed: which keys this worker has logged; of which batches its training step has made no loss; and the numbers, if the keys
        are those of the step before."""
        if self._version != self._job.world.version:
            self._version, self._agreed = self._job.world.version, ()
        left_out = [float(given.has_no_loss or given.is_left_out) for given in open_batches]
        names = [tuple(sorted(given.logged)) for given in open_batches]
        is_known = all(each == self._agreed for each in names)
        numbers = self._numbers(open_batches) if is_known else [0.0] * (NUMBERS * len(self._agreed) * len(names))
        return np.array([*summands(zlib.crc32(repr(names).encode())), *left_out, *numbers])

    def heard(self, sums: Table, open_batches: Sequence[GivenBatch]) -> bool:
        """Over all workers. Returns whether no further batch is to be left out. As a training step that returns None is made of no
        worker's part on one device, all workers leave the batch out.

        Raises:
            WorldBroken: keys have changed, and the numbers are not known.
        """
        first = SIZE + len(open_batches)
        marked = zip(open_batches, sums[SIZE:first].tolist(), strict=True)
        left_out = [each for each, mark in marked if mark and not each.is_left_out] if self._job.size > 1 else []
        for given in left_out:
            given.is_left_out = True
        if left_out:
            return False
        names = [tuple(sorted(given.logged)) for given in open_batches]
        if not all_equal(sums[:SIZE].tolist(), self._job.size):
            self._warn(DIFFERENT)
            self._found = [(name, value.own()) for given in open_batches for name, value in given.logged.items()]
            return True
        totals = sums[first:]
        if any(each != self._agreed for each in names):
            self._agreed = names[-1]
            totals = np.array(self._numbers(open_batches))
            if totals.size:
                totals = self._job.collective.sum(totals, "elasticdl.logged")
        every = (name for of_batch in names for name in of_batch)
        pairs = ((value, size) for value, size in totals.reshape(-1, NUMBERS).tolist())
        self._found = list(zip(every, pairs, strict=True))
        return True

    def _numbers(self, open_batches: Sequence[GivenBatch]) -> list[float]:
        return [
            each for given in open_batches for name in sorted(given.logged) for each in given.logged[name].numbers()
        ]

    def apply(self) -> None:
        """The step is made: what was found is what the script has logged."""
        found, self._found = self._found, []
        if not found:
            return
        with private.in_training_step(self._module):
            for (key, _), (value, size) in found:
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

    def _updates(self) -> list[int]:
        """Of torchmetrics objects."""
        if self._objects is None:
            every = self._module.modules()
            self._objects = [each for each in every if isinstance(getattr(type(each), "update_count", None), property)]
        return [each.update_count for each in self._objects]

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            self._job.warn(message)
