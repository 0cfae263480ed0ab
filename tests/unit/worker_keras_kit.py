"""What the tests of the worker's Keras side share: a small module, and a job whose worlds follow a script."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass

import tensorflow as tf
from worker_kit import Script, write_zoo

from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.core.interruptions import WorldBroken
from elasticdl.elastic.keras.keras_job import ElasticContext
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors
from elasticdl.elastic.training import plain_data
from elasticdl.job.spec import JobSpec
from elasticdl.worker.batch_sizes import batch_policy
from elasticdl.worker.frameworks import build_model
from elasticdl.worker.keras_learner import KerasLearner
from elasticdl.worker.trainer import Trainer
from elasticdl.worker.zoo import load_module

MODULE = """
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


def spec_maker(folder, monkeypatch):
    """Makes the specification of a job over a module of its own: 40 samples in batches of 10, four steps an epoch."""
    monkeypatch.setattr("sys.path", list(sys.path))

    def make(extra="", module=MODULE, **options):
        name = f"zoo_{uuid.uuid4().hex}"
        zoo = write_zoo(folder / "zoo", extra, module, name)
        batch = {} if "minibatch_size" in options else {"global_batch_size": 10}
        return JobSpec(**{"model_zoo": str(zoo), "model_def": name, "num_epochs": 3, **batch, **options})

    return make


class BreakingCollective(HorovodCollective):
    """Fails when a sum with one of the given names is asked for the n-th time.

    The other members, if any, contribute just what this one does; as rank 0, they send ``root_bytes``.
    """

    def __init__(self, failures=frozenset()):
        super().__init__(TensorFlowTensors())
        self.failures = failures
        self.done: dict[str, int] = {}
        self.root_bytes: bytes | None = None

    def require_one_engine(self, store, world):
        """They do."""

    def sum(self, tensor, name):
        self._count(name)
        return tf.convert_to_tensor(tensor) * self.world.size

    def broadcast_bytes(self, data, name):
        if self.world.rank == 0:
            return data
        if name == "elasticdl.evaluation.metrics":
            return plain_data.dumps({"loss": 1.0})
        return self.root_bytes or plain_data.dumps({"stop": False, "kept": {"callbacks": {}}})

    def gather(self, array, name):
        self._count(name)
        return [array] * self.world.size

    def _count(self, name):
        self.done[name] = self.done.get(name, 0) + 1
        if (name, self.done[name]) in self.failures:
            raise WorldBroken(f"{name} failed")


@dataclass
class Job:
    """One worker of a job under a script."""

    spec: JobSpec
    script: Script
    context: ElasticContext
    learner: KerasLearner
    trainer: Trainer


def make_job(spec: JobSpec, script: Script | None = None, failures=frozenset()) -> Job:
    script = script or Script()
    context = ElasticContext(script.session, BreakingCollective(failures), batch_policy(spec), spec.seed)
    module = load_module(spec)
    learner = KerasLearner(module, spec, context, build_model(module, spec.seed))
    return Job(spec, script, context, learner, Trainer(spec, context, learner))
