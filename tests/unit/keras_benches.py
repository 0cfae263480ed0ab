"""Benches of Keras: a loop of one's own, and ``fit``."""

from __future__ import annotations

import sys
from contextlib import closing

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import tensorflow as tf
from elastic_keras_kit import Count
from front_ends import BATCH, CLASSES, FEATURES, SAMPLES, Trained, samples
from job_kit import Job
from loop_benches import refused

from elasticdl.data import Arrays
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.keras.fit import Fit, FitCall
from elasticdl.elastic.keras.fit_data import FitData
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors


class KerasJob(Job):
    context_kind, tensors, last_of_step = ElasticContext, TensorFlowTensors, ("elasticdl.step",)

    def run(self, work):
        """Without traces, which would take longer than all the steps."""
        tf.config.run_functions_eagerly(True)
        try:
            return super().run(work)
        finally:
            tf.config.run_functions_eagerly(False)


class Counting(Count):
    """What it has counted changes what comes out."""

    def call(self, inputs):
        return super().call(inputs) / (1 + keras.ops.cast(self.calls, "float32") / 20)


class Bench:
    """What both share. The random numbers of a script's own are not promised: samples are read in a thread that seeds the generators."""

    Job, layers = KerasJob, ()

    def __init__(self, script):
        self.script, self.losses = script, []
        keras.utils.set_random_seed(0)
        dropout = [keras.layers.Dropout(script.dropout)] if script.dropout else []
        first, last = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)
        self.model = keras.Sequential([keras.Input((FEATURES,)), first, *self.layers, *dropout, last, Counting()])
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.data = samples()

    def train(self, job):
        context = job.init_in_place(BATCH)
        loader, make_epochs, state, *hooks = self.begin(context)
        try:
            with closing(loader):
                context.run(make_epochs, state, *hooks)
        except Stopped:
            sys.exit(0)  # as below `elastic.run`

    def trained(self):
        weights = [np.array(each) for each in (*self.model.weights, *self.optimizer.variables)]
        return Trained(weights, self.losses, int(self.model.layers[-1].calls))


class KerasLoop(Bench):
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


class KerasFit(Bench):
    def __init__(self, script):
        super().__init__(script)
        self.model.compile(self.optimizer, self.loss, jit_compile=False)

    def alone(self):
        given = {"batch_size": BATCH, "epochs": self.script.epochs, "shuffle": self.script.shuffle, "verbose": 0}
        self.model.fit(*self.data, callbacks=[Notes(self.losses)], **given)

    def begin(self, context):
        given = {"initial_epoch": 0, "verbose": 0, "shuffle": self.script.shuffle, "validation_freq": 1}
        callbacks = [Notes(self.losses), keras.callbacks.History()]
        call = FitCall(FitData.of(*self.data), callbacks, epochs=self.script.epochs, **given)
        fit = Fit(context, Stages(), self.model, call)
        return fit.state.loader, fit.train, fit.state, fit


class SamplesOfTwoShapes(KerasLoop):
    def __init__(self, script):
        super().__init__(script)
        self.dataset = [(np.zeros(1 + row), 0) for row in range(SAMPLES)]


class NormalizesWeights(KerasFit):
    layers = (keras.layers.SpectralNormalization(keras.layers.Dense(16)),)


KerasLoop.refusals = (refused(SamplesOfTwoShapes, "samples .* can't be put into one batch"),)
KerasFit.refusals = (refused(NormalizesWeights, "the model sets .*kernel, which is trained, whenever it is called"),)
