"""Evaluating a model over all members of the world, each sample once, whatever the framework.

Each member runs a contiguous share. Metrics need all outputs at once, so rank 0 gathers these, in pieces, and computes
them; the others receive the metrics alone.
"""

from __future__ import annotations

import io
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.tensor_adapter import Bytes
from elasticdl.elastic.core.plan import BatchPlan
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.training.job import JobContext

Array = npt.NDArray[Any]
Metrics = Mapping[str, Callable[[Any, Any], float]]  # of labels and outputs


def _nobody(*_: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over the whole evaluation set; the same on all members."""

    samples: int
    metrics: dict[str, float]


def _unpacked(packed: Sequence[Bytes]) -> tuple[float, list[Array]]:
    """Loss and columns of all members together; one without samples has no columns."""
    losses, shares = zip(*(pickle.loads(part.data) for part in packed), strict=True)  # of other members of the same job
    kinds = [[(column.shape[1:], column.dtype) for column in columns] for columns in shares if columns]
    if any(kind != kinds[0] for kind in kinds):
        raise UserError("evaluation: outputs or labels have another shape or type on another worker")
    return sum(losses), [np.concatenate(parts) for parts in zip(*filter(None, shares), strict=True)]


@dataclass(slots=True)
class Evaluator(ABC):
    """What is evaluated, and how; `evaluate` does it."""

    model: Any
    dataset: Any
    loss: Callable[[Any, Any], Any]  # of labels and outputs
    metrics: Metrics
    batch_size: int
    context: JobContext[Any]

    def evaluate(self, tell: Callable[..., object] = _nobody) -> Evaluation:
        """``tell`` is told of this member's batches as Keras tells its callbacks: the hook's name, batch and logs, which
        are over this member's samples so far.

        Raises:
            UserError: the model's outputs or the labels are not tensors with one row a sample.
            WorldBroken: a member was lost meanwhile.
        """
        collective, samples = self.context.collective, len(self.dataset)
        world = collective.world
        mine = BatchPlan.equal(np.arange(samples), world.size).mine(world.rank, self.batch_size)
        loss_sum, columns, like = self._run([np.asarray(micro_batch.indices) for micro_batch in mine], tell)
        file = io.BytesIO()
        pickle.dump((loss_sum, columns), file)
        self.context.advance(Activity.WAIT)
        packed = collective.gather(np.frombuffer(file.getbuffer(), np.uint8), "elasticdl.evaluation")
        metrics: dict[str, float] = {}
        if world.rank == 0:
            self.context.advance(Activity.ALIVE)  # the metrics are the user's, and the others wait for them
            loss, columns = _unpacked(packed)
            del packed
            outputs, labels = self._join(columns, like)
            metrics = {"loss": loss / samples} | {name: float(of(labels, outputs)) for name, of in self.metrics.items()}
            self.context.advance(Activity.WAIT)
        received = collective.broadcast_bytes(json.dumps(metrics).encode(), "elasticdl.evaluation.metrics")
        self.context.advance(Activity.ALIVE)
        return Evaluation(samples, json.loads(received))

    # -- what differs between frameworks --

    @abstractmethod
    def _fetch(self, batches: Sequence[npt.NDArray[np.int64]]) -> Generator[tuple[Any, Any], None, None]:
        """Inputs and labels for each batch of indices."""

    @abstractmethod
    def _test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        """Outputs and labels, nested, with one row a sample, and the mean loss over so many samples."""

    @abstractmethod
    def _flatten(self, value: Any) -> list[Array]:
        """The tensors in what `_test` returned, on the host, in types that no metric overflows."""

    @abstractmethod
    def _join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        """Outputs and labels as tensors, nested as in what `_test` returned."""

    # -- this member's part --

    def _run(
        self, batches: Sequence[npt.NDArray[np.int64]], tell: Callable[..., object]
    ) -> tuple[float, list[Array], Any]:
        """The sum of the losses; outputs and labels, one row a sample; and those of the last batch, nested as they are."""
        tested: list[list[Array]] = []
        loss_sum, seen, like = 0.0, 0, None
        with closing(self._fetch(batches)) as loaded:
            for number, (batch, (inputs, labels)) in enumerate(zip(batches, loaded, strict=True)):
                self.context.advance(Activity.ALIVE)
                tell("on_test_batch_begin", number, {})
                like, loss = self._test(inputs, labels, len(batch))
                tested.append(self._flatten(like))
                loss_sum, seen = loss_sum + loss * len(batch), seen + len(batch)
                tell("on_test_batch_end", number, {"loss": loss_sum / seen})
        return loss_sum, [np.concatenate(column) for column in zip(*tested, strict=True)], like


def require_rows(what: str, tensor: Any, rows: int) -> None:
    """Raises UserError if the tensor has not one row a sample."""
    shape = tuple(tensor.shape)
    if shape[:1] != (rows,):
        raise UserError(f"evaluation: {what} must have one row a sample: {rows}, but its shape is {shape}")
