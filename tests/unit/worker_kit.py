"""What the worker's tests share: a small model zoo for either framework, and a job whose worlds follow a script."""

from __future__ import annotations

import pickle
import sys
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from session_kit import FakeMaster, let_break

from elasticdl.elastic.collectives.port import Collective, Transfer
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.keras import loader
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors
from elasticdl.elastic.torch_kit import tensors as torch_tensors
from elasticdl.elastic.torch_kit.reducer import STEP
from elasticdl.job import messages as m
from elasticdl.job.spec import JobSpec
from elasticdl.worker.keras_learner import KerasLearner
from elasticdl.worker.learner import Learner, batch_policy, build_model
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


class ScriptedCore(WorkerCore):
    """Votes to leave as its script has it."""

    votes: Callable[[], bool]

    @property
    def leaving(self):
        return self.votes() or self._is_told_to_leave

    @leaving.setter
    def leaving(self, is_told):
        self._is_told_to_leave = is_told


class ScriptedMaster(FakeMaster):
    """A master that gives out worlds, one after the other; the worker is told to leave when there are no more.

    ``leave_after``: steps after which the world is left; ``stop_after``: step after which the worker is told to leave.
    In a world of several the others are made up: see `BreakingCollective`.
    """

    def __init__(
        self,
        leave_after: Iterable[int] = (),
        stop_after: int = 0,
        checkpoint: bool = True,
        most_worlds: int = 100,
        rank: int = 0,
        size: int = 1,
    ):
        core = ScriptedCore()
        core.votes = self.votes
        super().__init__(core=core)
        # At once: a worker waits for its master's first word.
        self.session.jobs_place, self.session.jobs_facts = lambda: (0, 0), bytes
        self.leave_after, self.stop_after, self.checkpoint = set(leave_after), stop_after, checkpoint
        self.most_worlds, self.rank, self.size = most_worlds, rank, size
        self.worlds = 0

    def answer(self, request):
        if self._stopping(request.step) or self.worlds == self.most_worlds:
            return p.Ordered(m.StopWork("told to leave", self.checkpoint))
        self.worlds += 1
        has_state = request.has_state or self.size > 1  # others are there already
        members = tuple(Member(i, "here", request.step, has_state) for i in range(self.size))
        return World.of(self.worlds, members, self.rank)

    def _stopping(self, step):
        return 0 < self.stop_after <= step

    def votes(self):
        upcoming = self.session.core.position.progress.step + 1
        if self._stopping(upcoming):
            return True
        left = upcoming in self.leave_after
        self.leave_after.discard(upcoming)
        return left


class FailingCollective(Collective):
    """Fails when an operation with one of the given names is done for the n-th time.

    The other members, if any, contribute just what this one does.
    """

    def __init__(self, tensors, failures: set[tuple[str, int]] = frozenset()):
        super().__init__(tensors)
        self.failures = failures
        self.done: dict[str, int] = {}

    def require_one_engine(self, store, world):
        """They do."""

    def gather(self, array, name):
        self.count(name)
        return [array] * self.world.size

    def count(self, name):
        self.done[name] = self.done.get(name, 0) + 1
        if (name, self.done[name]) in self.failures:
            raise WorldBroken(f"{name} failed")


class BreakingCollective(FailingCollective):
    def __init__(self, failures=frozenset()):
        super().__init__(torch_tensors.TorchTensors(), failures)

    def sum_(self, tensors, name):
        self.count(name)
        for tensor in tensors:
            tensor *= self.world.size
        return tensors

    def begin_sum(self, tensor, name):
        return Transfer(tensor)

    def finish(self, transfers):
        for transfer in transfers:
            transfer.tensor.mul_(self.world.size)

    def break_at_steps(self, reducer):
        """Also in a world of one, which sums nothing."""
        close, end = reducer.close, reducer.end

        def counted(work):
            self.count(STEP)
            return work()

        reducer.close = lambda **votes: counted(lambda: close(**votes))
        reducer.end = lambda state: counted(lambda: end(state))


class KerasCollective(FailingCollective):
    """As rank 0, the others send ``root_bytes``."""

    def __init__(self, failures=frozenset()):
        super().__init__(TensorFlowTensors(), failures)
        self.root_bytes: bytes | None = None

    def sum(self, tensor, name):
        self.count(name)
        return tf.convert_to_tensor(tensor) * self.world.size

    def broadcast_bytes(self, data, name):
        if self.world.rank == 0 or name == "elasticdl.judged":  # the others train the same
            return data
        if name == "elasticdl.evaluation.metrics":
            return pickle.dumps({"loss": 1.0})
        return self.root_bytes or pickle.dumps({"stop": False, "kept": {}})


@dataclass
class LearnersJob:
    """One worker of a job under a script."""

    spec: JobSpec
    script: ScriptedMaster
    context: Any
    learner: Learner
    trainer: Trainer

    def weights(self):
        model = self.learner.state.model
        of_torch = isinstance(self.learner, TorchLearner)
        values = [each.detach() for each in model.parameters()] if of_torch else model.variables
        return np.concatenate([np.ravel(each) for each in values])

    def kept(self):
        """The steps of its checkpoints."""
        return [checkpoint.step for checkpoint in self.learner.store.newest_first()]


def make_job(spec: JobSpec, script: ScriptedMaster | None = None, failures=frozenset(), callbacks=None) -> LearnersJob:
    """Of the framework of the module's model. ``callbacks``: in place of the module's."""
    script, module = script or ScriptedMaster(), load_module(spec)
    model = build_model(module, spec.seed)
    of_keras = hasattr(model, "trainable_variables")
    context_class, learner_class, collective = (
        (loader.ElasticContext, KerasLearner, KerasCollective(failures))
        if of_keras
        else (torch_tensors.ElasticContext, TorchLearner, BreakingCollective(failures))
    )
    context = context_class(script.session, collective, batch_policy(spec), spec.seed)
    learner = learner_class(module, spec, context, model)
    if callbacks is not None:
        learner.callbacks = callbacks
    if not of_keras:
        collective.break_at_steps(learner.state.reducer)
        if failures:  # which nobody has who is alone
            let_break(script.session.core)
    return LearnersJob(spec, script, context, learner, Trainer(spec, context, learner))


def trained(spec: JobSpec, *given, **options) -> LearnersJob:
    job = make_job(spec, *given, **options)
    job.trainer.run()
    return job
