"""Evaluating a model over all members of the world, each sample once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.batch_plan import split
from elasticdl.elastic.torch.collective import TorchCollective
from elasticdl.elastic.torch.device import to_device
from elasticdl.elastic.torch.loader import LoaderOptions, fetch
from elasticdl.worker.learner import Evaluation

Metrics = Mapping[str, Callable[[torch.Tensor, torch.Tensor], float]]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What is evaluated, and how; `evaluate` does it. ``advance`` is called for each batch."""

    model: torch.nn.Module
    dataset: Any
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    metrics: Metrics
    batch_size: int
    device: torch.device
    options: LoaderOptions
    collective: TorchCollective
    advance: Callable[[], None]

    def evaluate(self) -> Evaluation:
        """Each member runs a contiguous share; outputs are gathered, so that metrics are exact and equal everywhere.

        Raises:
            UserError: the model's outputs or the labels are not tensors with one row a sample.
            WorldBroken: a member was lost meanwhile.
        """
        world = self.collective.world
        samples = len(self.dataset)
        ends = [0, *accumulate(split(samples, world.size))]
        share = range(ends[world.rank], ends[world.rank + 1])
        outputs, labels, loss_sum = self._run(share)
        total = torch.tensor([loss_sum], dtype=torch.float64)
        self.collective.sum_([total], "elasticdl.evaluation.loss")
        outputs = self.collective.gather_rows(outputs, "elasticdl.evaluation.outputs")
        labels = self.collective.gather_rows(labels, "elasticdl.evaluation.labels")
        metrics = {name: float(metric(labels, outputs)) for name, metric in self.metrics.items()}
        return Evaluation(samples, {"loss": total.item() / samples, **metrics})

    def _run(self, share: range) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Outputs and labels of the given samples, one row each, and the sum of their losses."""
        # A member without samples runs one all the same, to know shape and type of the rows that it has none of.
        indices = list(share) or [0]
        batches = [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]
        generator = torch.Generator().manual_seed(0)  # an evaluation leaves the global one as it is
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        loss_sum = 0.0
        with evaluating(self.model), torch.inference_mode():
            for inputs, labels in fetch(self.dataset, batches, self.options, self.device, generator):
                self.advance()
                labels = to_device(labels, self.device)
                outputs = self.model(to_device(inputs, self.device))
                _require_rows("the model's output", outputs, len(batches[len(rows)]))
                _require_rows("the labels", labels, len(batches[len(rows)]))
                loss_sum += float(self.loss(labels, outputs)) * len(outputs)
                rows.append((_portable(outputs), _portable(labels)))
        outputs, labels = (torch.cat(column)[: len(share)] for column in zip(*rows, strict=True))
        return outputs, labels, loss_sum if len(share) else 0.0


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode within; afterwards each module is as it was (some may be frozen for good)."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _require_rows(what: str, value: Any, rows: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise UserError(f"evaluation: {what} must be one tensor, not {type(value).__name__}")
    if value.ndim == 0 or len(value) != rows:
        raise UserError(f"evaluation: {what} must have one row a sample: {rows}, but its shape is {tuple(value.shape)}")


def _portable(rows: torch.Tensor) -> torch.Tensor:
    """On the CPU, in a type that every collective can carry."""
    rows = rows.cpu()
    return rows.float() if rows.is_floating_point() and rows.itemsize < 4 else rows
