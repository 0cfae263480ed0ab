"""What the tests of the worker's Keras side share: a small module, and a job whose worlds follow a script."""

from __future__ import annotations

import pickle

import tensorflow as tf
import worker_kit
from worker_kit import Counting, Job, Script, job_of

from elasticdl.elastic.keras.loader import ElasticContext
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors
from elasticdl.job.spec import JobSpec
from elasticdl.worker.keras_learner import KerasLearner

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
    """40 samples in batches of 10, four steps an epoch."""
    return worker_kit.spec_maker(folder, monkeypatch, MODULE, global_batch_size=10, num_epochs=3)


class BreakingCollective(Counting):
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


def make_job(spec: JobSpec, script: Script | None = None, failures=frozenset()) -> Job:
    return job_of(spec, script, BreakingCollective(failures), ElasticContext, KerasLearner)
