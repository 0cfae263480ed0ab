"""What the tests of the Keras twin share: workers in the threads of one process."""

from __future__ import annotations

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import tensorflow as tf
from elastic_kit import SumOfThreads
from session_kit import FakeMaster, enter

from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors


def loss(labels, predictions):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions)


def make_model(middle=lambda: ()):
    """With the same weights each time; ``middle()``: layers between the dense ones."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), *middle(), keras.layers.ReLU(), keras.layers.Dense(3)]
    )


class Count(keras.layers.Layer):
    """Counts how often it is called."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1)
        return inputs


def norm_layer():
    return (keras.layers.BatchNormalization(momentum=0.5),)


def assert_same(before, after):
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


class Samples:
    def __init__(self, samples=50):
        generator = np.random.default_rng(1)
        self.inputs = generator.normal(size=(samples, 8)).astype("float32")
        self.labels = generator.integers(0, 3, samples)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Trainee:
    """One worker's context, model and state on a board; without ``joins`` it is yet to ask for the board's world."""

    def __init__(
        self,
        rank,
        board,
        policy,
        model=None,
        optimizer=None,
        joins=True,
        jit_compile=None,
        check_state="epoch",
        values=dict,
    ):
        self.collective = SumOfThreads(rank, board, TensorFlowTensors())
        self.policy, self.joins, self.check_state, self.values = policy, joins, check_state, values
        self.model = model or make_model()
        if jit_compile is not None:
            self.model.compile(jit_compile=jit_compile)
        self.optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
        self.train_step = TrainStep(self.model, loss, self.optimizer)
        self.data = Samples()
        self.begin()

    def begin(self):
        """As at the start of a process, but with what has been traced."""
        self.context = ElasticContext(FakeMaster().session, self.collective, self.policy, seed=0)
        self.context.check_state = self.check_state
        self.loader = ElasticDataLoader(self.context, self.data)
        self.state = KerasState(self.context, self.train_step, self.loader, self.values())
        self.losses = []
        if self.joins:
            enter(self.context, self.collective.world)

    def enter(self, rank, board):
        """The next world."""
        self.collective.enter(rank, board)
        enter(self.context, self.collective.world)

    def weights(self):
        return [variable.numpy() for variable in (*self.model.variables, *self.optimizer.variables)]

    def train(self, epochs=1, steps=None):
        for _ in self.loader.epochs(epochs):
            for batch in self.loader:
                self.losses.append(self.state.make_step(batch))
                self.state.commit()
                if steps is not None and len(self.losses) >= steps:
                    return
