"""What a script logs in its training step: of this worker's part of a batch, made that of the global batch.

Lightning keeps, for each key of ``self.log``, the value of the last batch and what adds up to that of the epoch. A step's
amounts are taken apart from these, summed over the workers before the gradients are, and put back once the step is
certain. So the accumulators are the same on all workers between two steps, and a step that is torn leaves no trace.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.elastic.core.vote import SIZE, all_equal, pieces
from elasticdl.elastic.torch_kit.host import OpenBatch
from elasticdl.elastic.torch_kit.tensors import ElasticContext

Table = npt.NDArray[np.float64]
NUMBERS = 3  # of a key
EXTREMES = ("max", "min")  # which no sum tells


@dataclass(slots=True)
class Amounts:
    """What a key adds to the step's value, to the sum over the epoch, and to the samples of that sum."""

    step: float
    value: float
    size: float

    def add(self, other: Amounts, kind: str) -> None:
        if kind in EXTREMES:
            choose = max if kind == "max" else min
            self.step, self.value = choose(self.step, other.step), choose(self.value, other.value)
        else:
            self.step, self.value = self.step + other.step, self.value + other.value
        self.size += other.size

    @classmethod
    def nothing(cls, kind: str) -> Amounts:
        start = {"max": -math.inf, "min": math.inf}.get(kind, 0.0)
        return cls(start, start, 0.0)


@dataclass(slots=True)
class GivenBatch(OpenBatch):
    index: int = 0  # as the training step is told
    asked: int = 0  # of the workers' answers, before the training step
    logged: dict[str, Amounts] = field(default_factory=dict)
    has_no_loss: bool = False  # the training step has returned None for this worker's part
    is_left_out: bool = False  # it has done so for some worker's


@dataclass(slots=True)
class Held:
    """A metric's accumulators."""

    value: torch.Tensor
    size: torch.Tensor | None

    @classmethod
    def of(cls, metric: Any) -> Held:
        return cls(metric.value, getattr(metric, "cumulated_batch_size", None))

    @classmethod
    def empty(cls, metric: Any) -> Held:
        return cls(metric._defaults["value"], metric._defaults.get("cumulated_batch_size"))

    def put(self, metric: Any) -> None:
        metric.value = self.value
        if self.size is not None:
            metric.cumulated_batch_size = self.size
        metric._computed = None

    def plus(self, other: Held, kind: str) -> Held:
        if kind in EXTREMES:
            return Held(getattr(torch, f"{kind}imum")(self.value, other.value), None)
        return Held(
            self.value + other.value,
            None if self.size is None or other.size is None else self.size + other.size,
        )


def kind_of(metric: Any) -> str:
    """How its values are reduced: mean, sum, max or min."""
    return str(metric.meta.reduce_fx.__name__)


class Logged:
    """The metrics of the training loop, by key."""

    def __init__(self, job: ElasticContext, trainer: Any) -> None:
        self.pending: dict[str, Held] = {}  # the job's, of keys that this worker's script has not logged yet
        self._job = job
        self._trainer = trainer
        self._objects: list[Any] | None = None  # of torchmetrics, in the module; none once it was warned of them
        self._base: dict[str, Held] = {}  # as before the batches in hand
        self._amounts: dict[str, Amounts] = {}  # of the step, on this worker
        self._totals: dict[str, Amounts] | None = None  # over all workers
        self._agreed: tuple[str, ...] = ()  # keys that all members of the world have logged in the last step
        self._version = -1  # of that world
        self._warnings: set[str] = set()  # that were given

    def begin_step(self) -> None:
        self._base = {key: Held.of(metric) for key, metric in self._metrics()}
        self._totals = None

    @contextlib.contextmanager
    def collecting(self, into: dict[str, Amounts], *, weight: float, loaded: int, samples: int) -> Iterator[None]:
        """Within, the training step runs on a sample of ``loaded``, of which ``samples`` count.

        ``weight``: their part of the global batch.
        """
        before = {}
        updates = self._updates()
        for key, metric in self._metrics():
            before[key] = Held.of(metric)
            Held.empty(metric).put(metric)
        try:
            yield
        except BaseException:  # nothing was logged
            for key, metric in self._metrics():
                before.get(key, Held.empty(metric)).put(metric)
            raise
        if self._updates() != updates:
            self._warn(
                "a torchmetrics object that is updated in training_step counts this worker's parts of the batches only: log values there"
            )
            self._objects = []
        for key, metric in self._metrics():
            kind, held = kind_of(metric), before.get(key)
            amounts = _amounts(metric, kind, weight, loaded, samples)
            if amounts is not None:
                into.setdefault(key, Amounts.nothing(kind)).add(amounts, kind)
            if held is not None:
                (held if amounts is None else held.plus(Held.of(metric), kind)).put(metric)

    def ride(self, open_batches: Sequence[GivenBatch]) -> Table:
        """To be summed: which keys this worker has logged; of which batches its training step has made no loss; and the amounts, if the keys are those
        of the step before."""
        world = self._job.world
        if self._version != world.version:
            self._version, self._agreed = world.version, ()
        self._totals, self._amounts = None, self._amounts_of(open_batches)
        left_out = [float(given.has_no_loss or given.is_left_out) for given in open_batches]
        keys = tuple(sorted(self._amounts))
        amounts = self._numbers() if keys == self._agreed else [0.0] * NUMBERS * len(self._agreed)
        return np.array([*pieces(_checksum(keys)), *left_out, *amounts])

    def heard(self, sums: Table, open_batches: Sequence[GivenBatch]) -> bool:
        """Over all workers. Returns whether no further batch is to be left out. As a training step that returns None is made of no
        worker's part on one device, all workers leave the batch out.

        Raises:
            WorldBroken: keys have changed, and the amounts are not known.
        """
        first = SIZE + len(open_batches)
        marked = zip(open_batches, sums[SIZE:first].tolist(), strict=True)
        left_out = [each for each, mark in marked if mark and not each.is_left_out] if self._job.size > 1 else []
        for given in left_out:
            given.is_left_out = True
        if left_out:
            return False
        keys = tuple(sorted(self._amounts))
        if not all_equal(sums[:SIZE].tolist(), self._job.size):
            self._warn(
                "the workers log different keys in training_step, and each its own values: let self.log not depend on the batch"
            )
            return True
        totals = sums[first:]
        if keys != self._agreed:
            self._agreed = keys
            totals = np.array(self._numbers())
            if keys:
                totals = self._job.collective.sum(totals, "elasticdl.logged")
        self._totals = {
            key: Amounts(*each) for key, each in zip(keys, totals.reshape(-1, NUMBERS).tolist(), strict=True)
        }
        for key in self._extremes() if self._job.size > 1 else ():
            self._totals[key] = self._amounts[key]
            self._warn(
                f"the largest or smallest {self._results()[key].meta.name!r} is that of each worker's part of a batch: log a mean, or a sum"
            )
        return True

    def _extremes(self) -> list[str]:
        results = self._results()
        return [key for key in sorted(self._amounts) if kind_of(results[key]) in EXTREMES]

    def _numbers(self) -> list[float]:
        """Infinite ones, as of a worker without a sample, would make others so."""
        extremes = set(self._extremes())
        every = ((0.0,) * NUMBERS if key in extremes else astuple(self._amounts[key]) for key in sorted(self._amounts))
        return [number for numbers in every for number in numbers]

    def _amounts_of(self, open_batches: Sequence[GivenBatch]) -> dict[str, Amounts]:
        amounts: dict[str, Amounts] = {}
        results = self._results()
        for each in open_batches:
            for key, added in each.logged.items():
                kind = kind_of(results[key])
                amounts.setdefault(key, Amounts.nothing(kind)).add(added, kind)
                if kind not in EXTREMES:
                    amounts[key].step = added.step  # that of the last batch is logged
        return amounts

    def apply(self) -> None:
        """The step is made: what was gathered is what the script has logged."""
        totals, self._totals = self._totals or {}, None
        results = self._results()
        for key, total in totals.items():
            metric = results[key]
            meta, like = metric.meta, metric.value
            if meta.on_step:
                metric._forward_cache = torch.tensor(total.step, dtype=like.dtype, device=like.device)
            if not meta.on_epoch:
                Held(metric._forward_cache, None).put(metric)
                continue
            value = torch.tensor(total.value, dtype=like.dtype, device=like.device)
            size = round(total.size) if abs(total.size - round(total.size)) < 1e-6 else total.size
            base = self._base.get(key) or Held.empty(metric)
            base.plus(Held(value, torch.tensor(size, device=like.device)), kind_of(metric)).put(metric)
        self.merge_pending()

    def merge_pending(self) -> None:
        results = self._results() if self.pending else {}
        for key in [key for key in self.pending if key in results]:
            metric = results[key]
            held = self.pending.pop(key)
            held.plus(Held.of(metric), kind_of(metric)).put(metric)

    def dump(self) -> dict[str, Held]:
        """Accumulators of the epoch; references, as Lightning makes new tensors of them."""
        held = {key: Held.of(m) for key, m in self._metrics() if m.meta.on_epoch and not m.has_reset}
        return {**self.pending, **held} if self.pending else held

    def load(self, accumulators: dict[str, Held]) -> None:
        results = self._results()
        for _, metric in self._metrics():
            Held.empty(metric).put(metric)
        self.pending = dict(accumulators)
        for key in results.keys() & self.pending.keys():
            self.pending.pop(key).put(results[key])

    def _results(self) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer.fit_loop.epoch_loop._results
        return found

    def _updates(self) -> list[int]:
        """Of torchmetrics objects."""
        if self._objects is None:
            every = self._trainer.lightning_module.modules()
            self._objects = [each for each in every if isinstance(getattr(type(each), "update_count", None), property)]
        return [each.update_count for each in self._objects]

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """Those of plain values; a torchmetrics object keeps its own."""
        for key, metric in self._results().items():
            if metric.is_tensor and not metric.meta.sync.rank_zero_only:
                yield key, metric

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            self._job.warn(message)


def _checksum(keys: tuple[str, ...]) -> int:
    return zlib.crc32(repr(keys).encode())


def _amounts(metric: Any, kind: str, weight: float, loaded: int, samples: int) -> Amounts | None:
    """What has been logged since the accumulators were emptied; None if nothing."""
    value = float(metric.value)
    if metric.value is metric._defaults["value"] or (not math.isfinite(value) and kind in EXTREMES):
        return None
    step = float(metric._forward_cache) if metric.meta.on_step else 0.0
    if not samples:  # of another worker's part
        return Amounts.nothing(kind)
    if kind != "mean":
        return Amounts(step, value, 0.0)
    if not metric.meta.on_epoch:
        return Amounts(step * weight, 0.0, 0.0)
    logged = float(metric.cumulated_batch_size)
    if not logged:
        return None
    # By its own number of samples, or by one that the script has given for the whole batch.
    size = logged / loaded * samples if logged % loaded == 0 else logged * weight
    return Amounts(step * weight, value / logged * size, size)
