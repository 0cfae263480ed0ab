"""Accumulation in either framework: models that are trained alike, on micro-batches or on the one big batch of each update."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf
import torch

from elasticdl.ga.keras import optimizers
from elasticdl.ga.torch import optim

STEPS, UPDATES = 3, 4
EXACT = {"float32": 1e-6, "float64": 1e-12}  # how much two trainings may be apart that compute the same


def make_data(count, dtype="float64"):
    random = np.random.default_rng(1)
    return random.normal(size=(count, 6)).astype(dtype), random.normal(size=(count, 4)).astype(dtype)


def make_batches(sizes=(4, 4, 4), dtype="float64", updates=UPDATES):
    """For each update one list of micro-batches."""
    inputs, labels = make_data(sum(sizes) * updates, dtype)
    cuts = np.cumsum(sizes * updates)[:-1]
    stream = list(zip(np.split(inputs, cuts), np.split(labels, cuts), strict=True))
    return [stream[start : start + len(sizes)] for start in range(0, len(stream), len(sizes))]


def flat(batches):
    return [micro_batch for micro_batches in batches for micro_batch in micro_batches]


def big(batches):
    return [tuple(np.concatenate(part) for part in zip(*batch, strict=True)) for batch in batches]


class SmallTraining:
    """A model of two layers and its optimizer: one that accumulates, or with ``steps=None`` the framework's own.

    ``optimizer``: a function of the variables, in place of the one of that name.
    """

    def __init__(self, name="Adam", steps=STEPS, rate=0.1, dtype="float64", optimizer=None, **options):
        self.model = self.make_model(dtype)
        made = optimizer or (lambda variables: self.make(name, variables, steps, rate, **options))
        self.optimizer = made(self.variables)

    def train(self, stream, samples=False):
        for inputs, labels in stream:
            self.take(inputs, labels, **({"samples": len(inputs)} if samples else {}))
        return self

    @classmethod
    def plain(cls, batches, **options):
        """What is wanted: the framework alone, whole batches."""
        return cls(steps=None, **options).train(big(batches))

    def difference(self, other):
        """The largest of all variables, relative to the variable."""
        pairs = list(zip(self.numbers(), other.numbers(), strict=True))
        return max(np.linalg.norm(mine - theirs) / (np.linalg.norm(theirs) or 1.0) for mine, theirs in pairs)

    def same(self, other, tolerance=1e-12):
        return self.difference(other) <= tolerance


class Torch(SmallTraining):
    kind, wrap, ready = torch.optim.SGD, optim.Optimizer, optim
    shipped = sorted(
        {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
        - {"Optimizer", "LBFGS", "SparseAdam"}
    )

    @staticmethod
    def make_model(dtype="float64"):
        torch.manual_seed(0)
        # No biases: Muon takes matrices only.
        linear = [torch.nn.Linear(size, 4, bias=False, dtype=getattr(torch, dtype)) for size in (6, 4)]
        return torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1])

    @staticmethod
    def make(name, weights, steps=None, rate=None, **options):
        given = options if rate is None else {"lr": rate, **options}
        kind = getattr(torch.optim if steps is None else optim, name)
        return kind(*[steps] * (steps is not None), weights, **given)

    @staticmethod
    def weights(*values, dtype="float64"):
        return [torch.nn.Parameter(torch.tensor(value, dtype=getattr(torch, dtype))) for value in values]

    @staticmethod
    def apply(optimizer, weights, gradients, **sizes):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = None if gradient is None else gradient * torch.ones_like(weight)
        optimizer.step(**sizes)

    @property
    def variables(self):
        return list(self.model.parameters())

    def numbers(self):
        return [each.detach().numpy() for each in self.model.parameters()]

    def loss(self, inputs, labels):
        outputs = self.model(torch.as_tensor(inputs))
        return torch.nn.functional.mse_loss(outputs, torch.as_tensor(labels))

    def take(self, inputs, labels, **sizes):
        self.optimizer.zero_grad()
        self.loss(inputs, labels).backward()
        self.optimizer.step(**sizes)


class Keras(SmallTraining):
    kind, wrap, ready = keras.optimizers.SGD, optimizers.Optimizer, optimizers
    shipped = sorted(set(optimizers.__all__) - {"Optimizer"})

    @staticmethod
    def make_model(dtype="float64"):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        layers = [dense(4, activation="tanh", dtype=dtype), dense(4, use_bias=False, dtype=dtype)]
        return keras.Sequential([keras.Input((6,), dtype=dtype), *layers])

    @staticmethod
    def make(name, weights, steps=None, rate=None, **options):
        given = options if rate is None else {"learning_rate": rate, **options}
        return getattr(keras.optimizers if steps is None else optimizers, name)(*[steps] * (steps is not None), **given)

    @staticmethod
    def weights(*values, dtype="float64"):
        return [keras.Variable(value, dtype=dtype) for value in values]

    @staticmethod
    def apply(optimizer, weights, gradients, **sizes):
        given = zip(weights, gradients, strict=True)
        optimizer.apply([g and tf.ones_like(w.value) * g for w, g in given], weights, **sizes)

    @property
    def variables(self):
        return self.model.trainable_variables

    def numbers(self):
        return [each.numpy() for each in self.model.variables]

    def gradients(self, inputs, labels):
        with tf.GradientTape() as tape:
            kernel, bias, last = self.variables  # the model, without the time that its layers take
            outputs = tf.tanh(inputs @ kernel.value + bias.value) @ last.value
            loss = self.optimizer.scale_loss(tf.reduce_mean(tf.square(outputs - labels)))
        return tape.gradient(loss, [variable.value for variable in self.variables])

    def take(self, inputs, labels, factor=1.0, **sizes):
        gradients = [gradient * factor for gradient in self.gradients(inputs, labels)]
        return self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True), **sizes)
