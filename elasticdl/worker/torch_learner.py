"""The PyTorch side of a training: optimizer, data and state for the model of a model-zoo module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of
from elasticdl.elastic.collectives.opening import require_collective
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, StepBatch, to_device
from elasticdl.elastic.torch_kit.passes import require_mean
from elasticdl.elastic.torch_kit.tensors import ElasticContext, TorchTensors, streams_apart, wait_for
from elasticdl.elastic.torch_kit.torch_evaluator import TorchEvaluator
from elasticdl.elastic.torch_kit.torch_state import TorchState
from elasticdl.elastic.training.data_facts import EVALUATION, Source
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.kept_state import aside
from elasticdl.job.spec import EVALUATE, JobSpec
from elasticdl.worker.learner import TORCH, Codec, Learner, largest_micro_batch, make_optimizer, rate_rules
from elasticdl.worker.zoo import (
    InputsOnly,
    ModelModule,
    inputs_of,
    make_callbacks,
    make_metrics,
    open_datasets,
    refuse_feed,
    try_first,
)

Loss = Callable[[Any, Any], torch.Tensor]


def _copy(value: Any) -> Any:
    """Dicts, lists and tuples become plain ones: a file is read by a loader that knows no others."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_copy, value)) if isinstance(value, list) else tuple(map(_copy, value))
    return value


class TorchLearner(Learner):
    """A PyTorch model being trained."""

    codec = Codec(
        ".pt",
        copy=_copy,
        write=torch.save,
        read=functools.partial(torch.load, map_location="cpu", weights_only=True),
    )
    context_class = ElasticContext
    state: TorchState
    _context: ElasticContext

    @staticmethod
    def check(module: ModelModule, spec: JobSpec, model: torch.nn.Module) -> None:
        require_collective(spec.collective, TorchTensors())
        refuse_feed(module)
        make_optimizer(module, TORCH, torch.optim.Optimizer, parameters=model.parameters())
        make_callbacks(module)
        make_metrics(module)
        training = open_datasets(module, spec).training
        try_first(module, spec, training, _first, model, functools.partial(_scalar, module.loss))

    def _make(self, module: ModelModule) -> None:
        spec, context = self._spec, self._context
        self._loss: Loss = module.loss
        refuse_feed(module)
        self._model.to(context.device)
        parameters = self._model.parameters()
        self._optimizer = make_optimizer(module, TORCH, torch.optim.Optimizer, parameters=parameters)
        data = open_datasets(module, spec)
        micro_batch = largest_micro_batch(spec, len(data.training))
        warm_up(self._model, self._loss, data.training, micro_batch, context.device)
        self.callbacks = make_callbacks(module)
        self.loader = ElasticDataLoader(context, data.training, shuffle=spec.shuffle, num_workers=spec.data_workers)
        self.state = TorchState(context, self._model, self._optimizer, self.loader, {"ledger": self.ledger})
        if data.evaluation is not None:
            self.state.sources.append(Source.of(EVALUATION, data.evaluation))
            self.evaluator = TorchEvaluator(
                self._model,
                data.evaluation,
                module.loss,
                make_metrics(module),
                batch_size=micro_batch,
                context=context,
                data_workers=spec.data_workers,
            )

    @classmethod
    def evaluator_of(
        cls, module: ModelModule, spec: JobSpec, context: JobContext, model: torch.nn.Module, dataset: Any
    ) -> TorchEvaluator:
        assert isinstance(context, ElasticContext)
        refuse_feed(module)
        model.to(context.device)
        loss, metrics = (module.loss, make_metrics(module)) if spec.task == EVALUATE else (None, {})
        collate = None
        if isinstance(dataset, InputsOnly):
            dataset, collate = dataset.dataset, _collate_inputs
        at_once = context.policy.most_at_once
        return TorchEvaluator(model, dataset, loss, metrics, at_once, context, spec.data_workers, collate)

    def follow_rules(self) -> None:
        rules = rate_rules(self._spec, self.callbacks)
        if rules.schedule is not None or rules.scaling is not None:  # else a callback of the module's may set the rate
            self.state.follow(rules)

    def make_step(self, batch: StepBatch) -> float:
        for inputs, labels in batch:
            batch.backward(self._loss(labels, self._model(inputs)))
        self._optimizer.step()
        return self.state.loss

    def save_model(self, folder: Path) -> Path:
        path = folder / "model.pt"
        with aside(path) as scratch, scratch.open("wb") as file:
            torch.save(self._model.state_dict(), file)
        return path


def _collate_inputs(samples: list[Any]) -> tuple[Any, int]:
    return default_collate(inputs_of(samples)), 0


# -- before joining --


def warm_up(model: torch.nn.Module, loss: Loss, dataset: Any, samples: int, device: torch.device) -> None:
    """Run the first samples through the model and back, so that the others need not wait for what is slow once;
    afterwards nothing is different from before.
    """
    with untouched(model):
        inputs, labels = to_device(_first(dataset, samples), device)
        value = _scalar(loss, labels, model(inputs))
        value.backward()  # type: ignore[no-untyped-call]
        wait_for(device)


def _scalar(loss: Loss, labels: Any, outputs: Any) -> torch.Tensor:
    value = loss(labels, outputs)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserError(
            f"{name_of(loss)}(labels, predictions) returned {found}; expected a scalar tensor: the mean over the samples"
        )
    require_mean(value, len(labels) if isinstance(labels, torch.Tensor) and labels.dim() else 0)
    return value


def _first(dataset: Any, samples: int) -> Any:
    return default_collate([dataset[index] for index in range(samples)])


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Buffers and the state of all random generators are put back at the end; gradients go."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with streams_apart():
            yield
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        model.zero_grad()
