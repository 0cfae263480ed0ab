"""Benches of Keras: a loop of one's own, and ``fit``; and what tests of steps and fits share."""

from __future__ import annotations

import sys
from contextlib import closing

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import tensorflow as tf
from elastic_kit import SumOfThreads
from front_ends import BATCH, CLASSES, FEATURES, SAMPLES, Trained, samples
from job_kit import Job
from loop_benches import changed, refused
from session_kit import FakeMaster, enter

from elasticdl.data import Arrays
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.keras.fit import Fit, FitCall
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader
from elasticdl.elastic.keras.models import Model
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors
from elasticdl.elastic.training.batch_shape import CurrentJob


class KerasJob(Job):
    context_kind, tensors, last_of_step = ElasticContext, TensorFlowTensors, ("elasticdl.step",)

    traces = False  # which takes longer than all the steps

    def run(self, work):
        tf.config.run_functions_eagerly(not self.traces)
        try:
            return super().run(work)
        finally:
            tf.config.run_functions_eagerly(False)


class Count(keras.layers.Layer):
    """Counts how often it is called."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1)
        return inputs


class CountingLayer(Count):
    """What it has counted changes what comes out."""

    def call(self, inputs):
        return super().call(inputs) / (1 + keras.ops.cast(self.calls, "float32") / 20)


class KerasBench:
    """What both share. The random numbers of a script's own are not promised: samples are read in a thread that seeds the generators."""

    Job, layers, batch = KerasJob, (), (BATCH, None)  # and how much of one at a time

    def __init__(self, script):
        self.script, self.losses = script, []
        keras.utils.set_random_seed(0)
        dropout = [keras.layers.Dropout(script.dropout)] if script.dropout else []
        first, last = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)
        self.model = keras.Sequential([keras.Input((FEATURES,)), first, *self.layers, *dropout, last, CountingLayer()])
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.data = samples()

    def train(self, job):
        context = job.init_in_place(*self.batch)
        loader, make_epochs, state, *hooks = self.begin(context)
        try:
            with closing(loader):
                context.run(make_epochs, state, *hooks)
        except Stopped:
            sys.exit(0)  # as below `elastic.run`

    def trained(self):
        weights = [np.array(each) for each in (*self.model.weights, *self.optimizer.variables)]
        return Trained(weights, self.losses, int(self.model.layers[-1].calls))


class KerasLoop(KerasBench):
    def __init__(self, script):
        super().__init__(script)
        self.dataset = Arrays(*self.data)

    def alone(self):
        self.model.compile(self.optimizer, self.loss)
        for epoch in range(self.script.epochs):
            order = epoch_order(SAMPLES, 0, epoch, shuffle=self.script.shuffle)
            for rows in np.split(np.asarray(order), SAMPLES // BATCH):
                self.model.reset_metrics()
                self.losses.append(float(self.model.train_on_batch(*(each[rows] for each in self.data))))

    def begin(self, context):
        loader = ElasticDataLoader(context, self.dataset, shuffle=self.script.shuffle)
        state = KerasState(context, TrainStep(self.model, self.loss, self.optimizer), loader, {})
        return loader, lambda: self.make_epochs(loader, state), state

    def make_epochs(self, loader, state):
        for _ in loader.epochs(self.script.epochs):
            for batch in loader:
                self.losses.append(state.make_step(batch))
                state.commit()


class Notes(keras.callbacks.Callback):
    """Means since the beginning of the epoch."""

    def __init__(self, losses):
        super().__init__()
        self.note = losses.append

    def on_train_batch_end(self, batch, logs=None):
        self.note(logs["loss"])


class Fitting(KerasBench):
    """One worker's call of ``fit``."""

    def __init__(self, model, data, callbacks=(), *, batch=16, most=16, **options):
        self.model, self.callbacks, self.batch = model, callbacks, (batch, most)
        self.history = keras.callbacks.History()
        given = {"epochs": 3, "initial_epoch": 0, "verbose": 0, "shuffle": False, "validation_freq": 1, **options}
        self.call = FitCall(data, [*callbacks, self.history], **given)

    def begin(self, context):
        self.fit = Fit(context, Stages(), self.model, self.call)
        return self.fit.state.loader, self.fit.train, self.fit.state, self.fit


class FitJob(KerasJob):
    """In place of what knows a process's job, its numbers, and its calls of ``fit``."""

    def init_in_place(self, *batch):
        context = super().init_in_place(*batch)
        self._own.known = CurrentJob(context), Stages()
        return context

    def __getattr__(self, name):
        current, stages = self._own.known
        return getattr(current if hasattr(CurrentJob, name) else stages, name)

    def context(self):
        return self.contexts[self.rank()]

    def train_stage(self, *training):
        try:
            self.context().run(*training)
        except Stopped:
            sys.exit(0)  # as below `elastic.run`


class KerasFit(KerasBench):
    """As Run:AI's scripts have it."""

    Job, runtimes = FitJob, tuple(f"elasticdl.elastic.keras.models.{name}" for name in ("own", "job", "stages"))

    def alone(self):
        self.fit(self.model, batch_size=BATCH)

    def train(self, job):
        job.init_in_place(BATCH)
        self.fit(Model(self.model))

    def fit(self, model, **given):
        model.compile(self.optimizer, self.loss, jit_compile=False)
        for first, epochs in self.calls():
            given.update(initial_epoch=first, epochs=epochs, shuffle=self.script.shuffle, verbose=0)
            model.fit(*self.data, callbacks=[Notes(self.losses)] * self.script.notes, **given)

    def calls(self):
        return [(0, self.script.epochs)]


class FitsByEpoch(KerasFit):
    def calls(self):
        return [(epoch, epoch + 1) for epoch in range(self.script.epochs)]


class SamplesOfTwoShapes(KerasLoop):
    def __init__(self, script):
        super().__init__(script)
        self.dataset = [(np.zeros(1 + row), 0) for row in range(SAMPLES)]


NORMALIZES = changed(KerasFit, layers=(keras.layers.SpectralNormalization(keras.layers.Dense(16)),))
KerasLoop.refusals = (refused(SamplesOfTwoShapes, "samples .* can't be put into one batch"),)
KerasFit.refusals = (refused(NORMALIZES, "the model sets .*kernel, which is trained, whenever it is called"),)


# -- ``fit`` of any model and data --


def numbers():
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(64, 6)).astype("float32")
    return inputs, (inputs @ generator.normal(size=(6, 1))).astype("float32")


AT_ONCE = 16  # samples in a batch of `fit`
X, Y = numbers()


def sequences(samples=48, steps=5):
    """Of unequal lengths, the long ones of each batch first; what comes after is 0, to be masked."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(samples, steps, 2)).astype("float32")
    lengths = np.sort(generator.integers(1, steps + 1, samples).reshape(-1, AT_ONCE), 1)[:, ::-1].ravel()
    inputs[np.arange(steps)[None] >= lengths[:, None]] = 0
    return inputs, generator.normal(size=(samples, steps, 1)).astype("float32")


class Batches(keras.utils.PyDataset):
    """Draws a new order between epochs; what reading leaves behind is of its process."""

    def __init__(self, draws=False, grows_in=None):
        """``draws``: where it is read, too."""
        super().__init__()
        self.random, self.draws, self.grows_in = np.random.default_rng(3), draws, grows_in
        self.order, self.level, self.calls = np.arange(len(X)), 1.0, []
        self.opened, self.read = -1, {}

    def __len__(self):
        return len(X) // AT_ONCE + (len(self.calls) == self.grows_in)

    def __getitem__(self, number):
        self.opened = number
        self.read[number] = True
        if self.draws:
            self.random.random()
        rows = self.order[number * AT_ONCE : (number + 1) * AT_ONCE]
        return X[rows] * np.float32(self.level), Y[rows]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.random.shuffle(self.order)


def dense(*middle, optimizer=None, loss="mse", **compiled):
    """Compiled, with the same weights each time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), *middle, keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.02), loss, jit_compile=False, **compiled)
    return model


def fit_together(workers, make, events=()):
    """``make(rank)`` gives each worker's `Fitting`; all train to the end, and the first error is raised. They are returned."""
    job = KerasJob(workers, events)
    job.traces, job.keeps_states = True, False
    members = [make(rank) for rank in range(workers + job.comers)]
    said, _ = job.run(lambda rank: members[rank].train(job))
    for error in filter(None, said):
        raise error
    return members


# -- steps of one's own --


def loss(labels, predictions):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions)


def make_model(middle=lambda: ()):
    """With the same weights each time; ``middle()``: layers between the dense ones."""
    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(16), *middle(), keras.layers.ReLU(), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((8,)), *layers])


class Samples:
    def __init__(self, samples=50):
        generator = np.random.default_rng(1)
        self.inputs = generator.normal(size=(samples, 8)).astype("float32")
        self.labels = generator.integers(0, 3, samples)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Read(Samples):
    """``sample(index)`` is what is read."""

    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def __getitem__(self, index):
        return self.sample(index)


class KerasTrainee:
    """One worker's context, model and state on a board; without ``joins`` it is yet to ask for the board's world."""

    def __init__(self, rank, board, policy, model=None, optimizer=None, joins=True, check_state="epoch"):
        self.collective = SumOfThreads(rank, board, TensorFlowTensors())
        self.model = model or make_model()
        self.optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
        self.train_step = TrainStep(self.model, loss, self.optimizer)
        self.context = ElasticContext(FakeMaster().session, self.collective, policy, seed=0)
        self.context.check_state = check_state
        self.loader = ElasticDataLoader(self.context, Samples())
        self.state = KerasState(self.context, self.train_step, self.loader, {})
        self.losses = []
        if joins:
            self.enter()

    def enter(self):
        enter(self.context, self.collective.world)

    def weights(self):
        return [variable.numpy() for variable in (*self.model.variables, *self.optimizer.variables)]

    def make_step(self, batch):
        self.losses.append(self.state.make_step(batch))

    def train(self, epochs=1):
        for _ in self.loader.epochs(epochs):
            for batch in self.loader:
                self.make_step(batch)
                self.state.commit()
