"""Accumulation in either framework: models that are trained alike, on micro-batches or on the one big batch of each update."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf
import torch

from elasticdl.ga.keras import optimizers
from elasticdl.ga.torch import optim

STEPS = 3
EXACT = {"float32": 1e-6, "float64": 1e-12}  # how much two trainings may be apart that compute the same


def make_data(count, dtype="float64"):
    random = np.random.default_rng(1)
    return random.normal(size=(count, 6)).astype(dtype), random.normal(size=(count, 4)).astype(dtype)


def make_batches(sizes=(4, 4, 4), dtype="float64", updates=4):
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

    @classmethod
    def make(cls, name, weights, steps=None, rate=None, **options):
        """``steps`` and a rate are given only if they are not None."""
        kind = getattr(cls.theirs if steps is None else cls.ready, name)
        rate = {} if rate is None else {cls.rate: rate}
        return kind(*[steps] * (steps is not None), *[weights] * cls.takes_weights, **rate, **options)

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
    wrap, ready, theirs, rate, takes_weights = optim.Optimizer, optim, torch.optim, "lr", True
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
    def weights(*values, dtype="float64"):
        return [torch.nn.Parameter(torch.tensor(value, dtype=getattr(torch, dtype))) for value in values]

    @staticmethod
    def apply(optimizer, weights, gradients, **sizes):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient * torch.ones_like(weight) if isinstance(gradient, float) else gradient
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

    def load(self, other):
        """What the other has saved, as in another process, without trust."""
        with tempfile.TemporaryFile() as file:
            torch.save((other.model.state_dict(), other.optimizer.state_dict()), file)
            file.seek(0)
            model, state = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state)


class Keras(SmallTraining):
    wrap, ready, theirs, rate = optimizers.Optimizer, optimizers, keras.optimizers, "learning_rate"
    takes_weights = False
    shipped = sorted(set(optimizers.__all__) - {"Optimizer"})

    @staticmethod
    def make_model(dtype="float64"):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        layers = [dense(4, activation="tanh", dtype=dtype), dense(4, use_bias=False, dtype=dtype)]
        return keras.Sequential([keras.Input((6,), dtype=dtype), *layers])

    @staticmethod
    def weights(*values, dtype="float64"):
        return [keras.Variable(value, dtype=dtype) for value in values]

    @staticmethod
    def apply(optimizer, weights, gradients, **sizes):
        given = zip(weights, gradients, strict=True)
        whole = [tf.ones_like(w.value) * each if isinstance(each, float) else each for w, each in given]
        optimizer.apply(whole, weights, **sizes)

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

    def load(self, other):
        for each in (self, other):
            each.model.compile(each.optimizer, "mse", auto_scale_loss=False)
            each.optimizer.build(each.variables)
        with tempfile.TemporaryDirectory() as folder:
            other.model.save_weights(f"{folder}/of.weights.h5")
            self.model.load_weights(f"{folder}/of.weights.h5")
