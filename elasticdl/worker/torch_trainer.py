"""The PyTorch side of a training: model, optimizer, data and state made from a model-zoo module."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.batch_plan import BatchPolicy
from elasticdl.elastic.torch.context import ElasticContext
from elasticdl.elastic.torch.loader import LoaderOptions
from elasticdl.elastic.torch.rng import seed_step
from elasticdl.elastic.torch.sampler import StepBatch
from elasticdl.elastic.torch.state import TorchState
from elasticdl.worker.checkpoint import Checkpoint, open_store
from elasticdl.worker.checkpoint_writer import Dump
from elasticdl.worker.datasets import Datasets, open_datasets
from elasticdl.worker.evaluation import Evaluator
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.resume import Origin, content, load_newest
from elasticdl.worker.trainer import Evaluation
from elasticdl.worker.user_code import shown
from elasticdl.worker.warm_up import warm_up
from elasticdl.worker.zoo import ModelModule, make_metrics

DEFAULT_MINIBATCH = 64


def batch_policy(spec: JobSpec) -> BatchPolicy:
    """The one policy that the options mean."""
    worker_batch = None if spec.global_batch_size else spec.minibatch_size or DEFAULT_MINIBATCH
    return BatchPolicy(spec.global_batch_size, worker_batch, spec.max_worker_batch_size)


def largest_micro_batch(spec: JobSpec, samples: int) -> int:
    """The most samples that a worker will run through the model at once."""
    policy = batch_policy(spec)
    share = -(-policy.batch_size(1) // spec.num_workers.minimum) if policy.fixed else policy.batch_size(1)
    return min(share, policy.max_micro_batch or share, samples)


def build_model(module: ModelModule) -> torch.nn.Module:
    """Raises:
    UserError: ``custom_model()`` returns something else than a PyTorch model.
    """
    model = module.custom_model()
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{shown(module.path)}: {module.custom_model.__name__}() returned {type(model).__name__}; "
            "expected a torch.nn.Module (PyTorch models only, so far)"
        )
    return model


def build_optimizer(module: ModelModule, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Raises:
    UserError: ``optimizer(parameters)`` returns something else than a PyTorch optimizer.
    """
    optimizer = module.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{shown(module.path)}: {module.optimizer.__name__}(parameters) returned {type(optimizer).__name__}; "
            "expected a torch.optim.Optimizer"
        )
    return optimizer


class TorchLearner:
    """A PyTorch model being trained; see `elasticdl.worker.trainer.Learner`."""

    def __init__(self, module: ModelModule, spec: JobSpec, context: ElasticContext) -> None:
        """Build everything and run a warm-up pass; may take long, and belongs before joining.

        Raises:
            UserError: the module does not keep the contract.
            Exception: whatever the user's code raises.
        """
        seed_step(spec.seed, 0, 0)  # every worker builds the same model
        self._loss: Callable[[Any, Any], torch.Tensor] = module.loss
        self._model = build_model(module).to(context.device)
        self._optimizer = build_optimizer(module, self._model)
        data = open_datasets(module, spec)
        options = LoaderOptions(num_workers=spec.data_workers)
        micro_batch = largest_micro_batch(spec, len(data.training))
        warm_up(self._model, self._loss, data.training, micro_batch, context.device)
        self.loader = context.loader(data.training, shuffle=spec.shuffle, options=options)
        self.state: TorchState = context.state(self._model, self._optimizer, self.loader, {"ledger": Ledger()})
        self.store = open_store(spec)
        self._origin = Origin(samples=len(data.training), seed=spec.seed, shuffle=spec.shuffle)
        self._evaluator = self._make_evaluator(module, data, micro_batch, context, options)

    def make_step(self, batch: StepBatch) -> float:
        for inputs, labels in batch:
            batch.backward(self._loss(labels, self._model(inputs)))
        self._optimizer.step()
        assert self.state.vote is not None  # cast in that step
        return self.state.vote.loss

    def evaluate(self) -> Evaluation | None:
        return self._evaluator.evaluate() if self._evaluator else None

    def resume(self) -> Checkpoint | None:
        return load_newest(self.store, self.state, self._origin) if self.store else None

    def copy(self) -> Dump:
        copied = content(self.state, self._origin)
        return lambda file: torch.save(copied, file)

    def save_model(self, folder: Path) -> Path:
        path = folder / "model.pt"
        scratch = folder / f".model.pt.{os.getpid()}"
        try:
            with scratch.open("wb") as file:
                torch.save(self._model.state_dict(), file)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        return path

    def _make_evaluator(
        self, module: ModelModule, data: Datasets, batch_size: int, context: ElasticContext, options: LoaderOptions
    ) -> Evaluator | None:
        if data.evaluation is None:
            return None
        return Evaluator(
            model=self._model,
            dataset=data.evaluation,
            loss=module.loss,
            metrics=make_metrics(module),
            batch_size=batch_size,
            device=context.device,
            options=options,
            collective=context.collective,
            advance=lambda: context.advance(waiting=False),
        )
