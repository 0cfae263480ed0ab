"""Evaluating a PyTorch model over all members of a world; see `elasticdl.elastic.training.evaluation`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.loaders import Collate, fetch, to_device
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import Caches, Model, tensors_of
from elasticdl.elastic.training.evaluation import Array, Evaluator, require_rows
from elasticdl.elastic.training.inference_state import InferenceState
from elasticdl.elastic.training.pieces import mapped


@dataclass(slots=True)
class TorchEvaluator(Evaluator):
    """Model and data may be on any device; metrics are given tensors on the CPU."""

    context: ElasticContext
    data_workers: int = 0
    collate_fn: Collate | None = None

    def fetch(self, batches: Iterable[Array]) -> Generator[tuple[Any, Any], None, None]:
        indices = (batch.tolist() for batch in batches)
        generator = torch.Generator().manual_seed(0)  # an evaluation leaves the global one as it is
        load = partial(fetch, num_workers=self.data_workers, collate_fn=self.collate_fn, generator=generator)
        yield from load(self.dataset, indices, self.context.device)

    def test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        labels = to_device(labels, self.context.device)
        with evaluating(self.model), torch.inference_mode():
            outputs = self.model(to_device(inputs, self.context.device))
            if self.loss is None:
                return (outputs, labels), 0.0
            _require_tensors((outputs, labels), rows)
            return (outputs, labels), float(self.loss(labels, outputs))

    def on_host(self, outputs: Any) -> Any:
        return mapped(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, outputs)

    def flatten(self, value: tuple[Any, Any], rows: int) -> list[Array]:
        _require_tensors(value, rows)
        host = [each.cpu() for each in value]
        # NumPy does not know all of the small types.
        return [(each.float() if each.is_floating_point() and each.itemsize < 4 else each).numpy() for each in host]

    def state(self, role: str, values: dict[str, Any]) -> InferenceState:
        model = Model(self.model), Caches(lambda: [self.model])
        return InferenceState(self.context, tensors_of(self.context), role, self.dataset, model, values)

    def join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        outputs, labels = map(torch.from_numpy, columns)
        return outputs, labels


def _require_tensors(outputs_and_labels: tuple[Any, Any], rows: int) -> None:
    for what, each in zip(("the model's output", "the labels"), outputs_and_labels, strict=True):
        if not isinstance(each, torch.Tensor):
            raise UserError(f"evaluation: {what} must be one tensor, not {type(each).__name__}")
        require_rows(f"evaluation: {what}", each, rows)


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
