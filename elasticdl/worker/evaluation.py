"""Evaluating a model over all members of the world, each sample once, whatever the framework.

Each member runs a contiguous share. Metrics need all outputs at once, so rank 0 gathers these, in pieces, and computes
them; the others receive the metrics alone.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Bytes, Collective
from elasticdl.elastic.core.batch_plan import split
from elasticdl.worker.learner import Evaluation

Array = npt.NDArray[Any]
Metrics = Mapping[str, Callable[[Any, Any], float]]  # of labels and outputs

LOSS_BYTES = 8


class BatchWatcher(Protocol):
    """Is told of the batches of an evaluation, as Keras tells its callbacks."""

    def on_test_batch_begin(self, batch: int) -> None: ...

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """``logs``: over this member's samples so far."""


class Advance(Protocol):
    """As `elasticdl.elastic.training.context.JobContext.advance`."""

    def __call__(self, *, waiting: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Share:
    """What one member found on its samples: the sum of their losses, and outputs and labels, one row a sample."""

    loss: float
    columns: list[Array]
    like: Any  # outputs and labels of the last batch, nested as they are

    def pack(self) -> Bytes:
        parts = [np.array([self.loss]), *self.columns]
        return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])

    def unpack(self, packed: Sequence[Bytes], rows: Sequence[int]) -> tuple[float, list[Array]]:
        """Loss and columns of all members together.

        Raises:
            UserError: those of another member are of other shapes or types.
        """
        ends = [LOSS_BYTES for _ in packed]
        columns = []
        for mine in self.columns:
            starts = ends
            width = mine.itemsize * int(np.prod(mine.shape[1:], dtype=np.int64))
            ends = [start + count * width for start, count in zip(starts, rows, strict=True)]
            parts = [part[start:end] for part, start, end in zip(packed, starts, ends, strict=True)]
            columns.append(np.concatenate(parts).view(mine.dtype).reshape(-1, *mine.shape[1:]))
        if ends != [len(part) for part in packed]:
            raise UserError("evaluation: outputs or labels have another shape or type on another worker")
        return sum(float(part[:LOSS_BYTES].view(np.float64)[0]) for part in packed), columns


@dataclass(slots=True)
class Evaluator(ABC):
    """What is evaluated, and how; `evaluate` does it. ``advance`` is called for each batch."""

    model: Any
    dataset: Any
    loss: Callable[[Any, Any], Any]  # of labels and outputs
    metrics: Metrics
    batch_size: int
    collective: Collective
    advance: Advance

    def evaluate(self, watcher: BatchWatcher | None = None) -> Evaluation:
        """``watcher``: is told of this member's batches.

        Raises:
            UserError: the model's outputs or the labels are not tensors with one row a sample.
            WorldBroken: a member was lost meanwhile.
        """
        world, samples = self.collective.world, len(self.dataset)
        rows = split(samples, world.size)
        ends = [0, *accumulate(rows)]
        share = self._run(np.arange(ends[world.rank], ends[world.rank + 1]), watcher)
        self.advance(waiting=True)
        packed = self.collective.gather(share.pack(), "elasticdl.evaluation")
        metrics: dict[str, float] = {}
        if world.rank == 0:
            loss, columns = share.unpack(packed, rows)
            del packed
            outputs, labels = self._join(columns, share.like)
            metrics = {"loss": loss / samples} | {name: float(of(labels, outputs)) for name, of in self.metrics.items()}
        received = self.collective.broadcast_bytes(json.dumps(metrics).encode(), "elasticdl.evaluation.metrics")
        self.advance(waiting=False)
        return Evaluation(samples, json.loads(received))

    # -- what differs between frameworks --

    @abstractmethod
    def _fetch(self, batches: Sequence[npt.NDArray[np.int64]]) -> Generator[tuple[Any, Any], None, None]:
        """Inputs and labels for each batch of indices."""

    @abstractmethod
    def _test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        """Outputs and labels, nested, and the mean loss over so many samples.

        Raises:
            UserError: outputs or labels are not tensors with one row a sample.
        """

    @abstractmethod
    def _flatten(self, value: Any) -> list[Array]:
        """The tensors in what `_test` returned, on the host, in types that no metric overflows."""

    @abstractmethod
    def _join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        """Outputs and labels as tensors, nested as in what `_test` returned."""

    # -- this member's part --

    def _run(self, indices: npt.NDArray[np.int64], watcher: BatchWatcher | None) -> _Share:
        batches = [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]
        tested: list[list[Array]] = []
        loss_sum, seen, like = 0.0, 0, None
        with closing(self._fetch(batches)) as loaded:
            for number, (batch, (inputs, labels)) in enumerate(zip(batches, loaded, strict=True)):
                self.advance(waiting=False)
                if watcher:
                    watcher.on_test_batch_begin(number)
                like, loss = self._test(inputs, labels, len(batch))
                tested.append(self._flatten(like))
                loss_sum, seen = loss_sum + loss * len(batch), seen + len(batch)
                if watcher:
                    watcher.on_test_batch_end(number, {"loss": loss_sum / seen})
        return _Share(loss_sum, [np.concatenate(column) for column in zip(*tested, strict=True)], like)


def require_rows(what: str, tensor: Any, rows: int) -> None:
    """Raises:
    UserError: the tensor has not one row a sample.
    """
    shape = tuple(tensor.shape)
    if shape[:1] != (rows,):
        raise UserError(f"evaluation: {what} must have one row a sample: {rows}, but its shape is {shape}")
