"""Evaluating a PyTorch model."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.device import to_device
from elasticdl.elastic.torch.loader import LoaderOptions, fetch
from elasticdl.worker.evaluation import Array, Evaluator, require_rows


@dataclass(slots=True)
class TorchEvaluator(Evaluator):
    """Model and data may be on any device; metrics are given tensors on the CPU."""

    device: torch.device
    options: LoaderOptions

    def _fetch(self, batches: Sequence[Array]) -> Generator[tuple[Any, Any], None, None]:
        generator = torch.Generator().manual_seed(0)  # an evaluation leaves the global one as it is
        yield from fetch(self.dataset, [batch.tolist() for batch in batches], self.options, self.device, generator)

    def _test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        labels = to_device(labels, self.device)
        with evaluating(self.model), torch.inference_mode():
            outputs = self.model(to_device(inputs, self.device))
            for what, value in (("the model's output", outputs), ("the labels", labels)):
                if not isinstance(value, torch.Tensor):
                    raise UserError(f"evaluation: {what} must be one tensor, not {type(value).__name__}")
                require_rows(what, value, rows)
            return (outputs, labels), float(self.loss(labels, outputs))

    def _flatten(self, value: tuple[torch.Tensor, torch.Tensor]) -> list[Array]:
        return [_portable(each).numpy() for each in value]

    def _join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        outputs, labels = map(torch.from_numpy, columns)
        return outputs, labels


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


def _portable(rows: torch.Tensor) -> torch.Tensor:
    """On the CPU, in a type that NumPy knows."""
    rows = rows.cpu()
    return rows.float() if rows.is_floating_point() and rows.itemsize < 4 else rows
