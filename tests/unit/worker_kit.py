"""What the worker's tests share: a small model zoo for either framework, and trainings of its modules by workers in threads."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import keras_benches
import numpy as np
import pytest
from job_kit import Job

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.job.spec import JobSpec
from elasticdl.worker.keras_learner import KerasLearner
from elasticdl.worker.learner import batch_policy, build_model
from elasticdl.worker.torch_learner import TorchLearner
from elasticdl.worker.trainer import Trainer
from elasticdl.worker.zoo import load_module

MODULE = """
import torch
from torch.utils.data import TensorDataset


def custom_model():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))


def loss(labels, predictions):
    return torch.nn.functional.mse_loss(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def dataset(mode, path):
    generator = torch.Generator().manual_seed(1 if mode == "training" else 2)
    inputs = torch.randn(40 if mode == "training" else 10, 2, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def eval_metrics_fn():
    return {"error": lambda labels, outputs: (labels - outputs).abs().mean().item()}
"""


KERAS_MODULE = """
import keras
import numpy as np


def custom_model():
    return keras.Sequential([
        keras.Input((2,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1),
        keras.layers.Dense(1),
    ])


def loss(labels, predictions):
    return keras.ops.mean(keras.losses.mean_squared_error(labels, predictions))


def optimizer():
    return keras.optimizers.SGD(0.1, momentum=0.9)


class Samples:
    def __init__(self, count, seed):
        self.inputs = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum(keepdims=True)


def dataset(mode, path):
    return Samples(40, 1) if mode == "training" else Samples(10, 2)


def eval_metrics_fn():
    return {"error": lambda labels, outputs: keras.ops.abs(labels - outputs)}
"""


def write_zoo(folder: Path, extra: str = "", module: str = MODULE, name: str = "line") -> Path:
    """A zoo of one module; each test's has a name of its own, as modules are imported once per process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(module + extra)
    return folder


def function(signature: str, *lines: str) -> str:
    """For a module: one more function, or another one of that name."""
    return f"\n\ndef {signature}:\n    " + "\n    ".join(lines) + "\n"


def spec_maker(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str = MODULE, **defaults: object):
    """Makes the specification of a job over a module of its own, with something added or with something else."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(folder)

    def make(extra: str = "", module: str = module, **options: object) -> JobSpec:
        name = f"zoo_{uuid.uuid4().hex}"
        given = {"model_zoo": str(write_zoo(folder / "zoo", extra, module, name)), "model_def": name, **defaults}
        if "minibatch_size" in options:
            del given["global_batch_size"]
        return JobSpec(**{**given, **options})

    return make


class Training:
    """Of a module of the zoo, by workers of a job; what is asked for is of worker 0. ``events``, ``breaks``: as of `Job`."""

    def __init__(self, spec: JobSpec, events=(), *, workers=1, breaks=(), callbacks=None):
        """``callbacks``: in place of the module's, of each worker."""
        self.spec, module = spec, load_module(spec)
        models = [build_model(module, spec.seed) for _ in range(workers)]
        of_keras = hasattr(models[0], "trainable_variables")
        self.job = job = (keras_benches.KerasJob if of_keras else Job)(workers, events)
        job.keeps_states, job.breaks = False, dict(breaks)
        self.learners = [None] * workers

        def work(rank):
            context = job.join(batch_policy(spec), spec.seed)
            made = (KerasLearner if of_keras else TorchLearner)(module, spec, context, models[rank])
            self.learners[rank] = made
            if callbacks is not None:
                made.callbacks = callbacks[rank]
            try:
                Trainer(spec, context, made).run()
            except Stopped:
                sys.exit(0)

        self.said, _ = job.run(work)
        self.line, self.learner = job.lines[0], self.learners[0]
        for error in self.said:
            if isinstance(error, UserError):
                raise error

    def weights(self):
        model = self.learner.state.model
        of_torch = isinstance(self.learner, TorchLearner)
        values = [each.detach() for each in model.parameters()] if of_torch else model.variables
        return np.concatenate([np.ravel(each) for each in values])

    def kept(self):
        """The steps of its checkpoints."""
        return [checkpoint.step for checkpoint in self.learner.store.newest_first()]
