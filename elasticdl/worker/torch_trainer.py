"""The PyTorch side of a training: optimizer, data and state for the model of a model-zoo module."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from elasticdl.callbacks import Callback
from elasticdl.common.reason import name_of
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.core.world import World
from elasticdl.elastic.torch.collective import TorchCollective
from elasticdl.elastic.torch.context import ElasticContext
from elasticdl.elastic.torch.context import connect as connect
from elasticdl.elastic.torch.loader import LoaderOptions
from elasticdl.elastic.torch.sampler import StepBatch
from elasticdl.elastic.torch.state import TorchState
from elasticdl.worker.batches import largest_micro_batch
from elasticdl.worker.checkpoint import Checkpoint, open_store
from elasticdl.worker.datasets import Datasets, open_datasets
from elasticdl.worker.feeds import refuse_feed
from elasticdl.worker.first_samples import Blame, require_fit
from elasticdl.worker.frameworks import TORCH, make_optimizer
from elasticdl.worker.learner import Dump, Evaluation
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.rate import rate_rules
from elasticdl.worker.resume import Origin, content, load_newest
from elasticdl.worker.torch_checkpoint import TorchCodec
from elasticdl.worker.torch_evaluation import TorchEvaluator
from elasticdl.worker.user_code import blame
from elasticdl.worker.warm_up import try_out, warm_up
from elasticdl.worker.zoo import ModelModule, make_callbacks, make_metrics


def make_learner(module: ModelModule, spec: JobSpec, context: ElasticContext, model: torch.nn.Module) -> TorchLearner:
    return TorchLearner(module, spec, context, model)


def check(module: ModelModule, spec: JobSpec, model: torch.nn.Module) -> None:
    TorchCollective.require_horovod()
    refuse_feed(module.dataset, module.path)
    with blame(f"{name_of(module.optimizer)}(parameters)", module.folder):
        _make_optimizer(module, model)
    with blame("callbacks()", module.folder):
        make_callbacks(module)
    with blame("eval_metrics_fn()", module.folder):
        make_metrics(module)
    training = open_datasets(module, spec).training
    require_fit(try_out(model, module.loss, training, Blame(module, spec)), spec, len(training))


def _make_optimizer(module: ModelModule, model: torch.nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = make_optimizer(module, TORCH, torch.optim.Optimizer, parameters=model.parameters())
    return made


class TorchLearner:
    """A PyTorch model being trained; see `elasticdl.worker.learner.Learner`."""

    def __init__(self, module: ModelModule, spec: JobSpec, context: ElasticContext, model: torch.nn.Module) -> None:
        self._spec = spec
        self._loss: Callable[[Any, Any], torch.Tensor] = module.loss
        refuse_feed(module.dataset, module.path)
        self._model = model.to(context.device)
        self._optimizer = _make_optimizer(module, self._model)
        data = open_datasets(module, spec)
        options = LoaderOptions(num_workers=spec.data_workers)
        micro_batch = largest_micro_batch(spec, len(data.training))
        warm_up(self._model, self._loss, data.training, micro_batch, context.device)
        self.callbacks: list[Callback] = make_callbacks(module)
        self.loader = context.loader(data.training, shuffle=spec.shuffle, options=options)
        self.state: TorchState = context.state(self._model, self._optimizer, self.loader, {"ledger": Ledger()})
        self._codec = TorchCodec()
        self.store = open_store(spec, self._codec.suffix)
        self._origin = Origin(samples=len(data.training), seed=spec.seed, shuffle=spec.shuffle)
        self._evaluator = self._make_evaluator(module, data, micro_batch, context, options)

    def follow(self, callbacks: Sequence[Callback]) -> None:
        self.state.follow(rate_rules(self._spec, callbacks))

    def make_step(self, batch: StepBatch) -> float:
        for inputs, labels in batch:
            batch.backward(self._loss(labels, self._model(inputs)))
        self._optimizer.step()
        assert self.state.vote is not None  # cast in that step
        return self.state.vote.loss

    def evaluate(self) -> Evaluation | None:
        return self._evaluator.evaluate() if self._evaluator else None

    def resume(self) -> Checkpoint | None:
        found = load_newest(self.store, self.state, self._origin, self._codec) if self.store else None
        return found.checkpoint if found else None

    def copy(self) -> Dump:
        return content(self.state, self._origin, self._codec)

    def enter(self, world: World) -> None:
        """Nothing to do."""

    def settle(self, *, entering: bool) -> bool:
        return False  # callbacks keep nothing and stop nothing

    def complete(self) -> None:
        """Nothing to do."""

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
    ) -> TorchEvaluator | None:
        if data.evaluation is None:
            return None
        return TorchEvaluator(
            model=self._model,
            dataset=data.evaluation,
            loss=module.loss,
            metrics=make_metrics(module),
            batch_size=batch_size,
            device=context.device,
            options=options,
            collective=context.collective,
            advance=context.advance,
        )
