"""What can't be had with Keras is one line: in a loop of one's own, of its samples, and in ``fit``."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from elastic_kit import Board
from keras_benches import (
    Batches,
    FitJob,
    Fitting,
    KerasFit,
    KerasTrainee,
    Read,
    X,
    Y,
    dense,
    fit_together,
    make_model,
    sequences,
)
from refusal_kit import refused

import elasticdl.elastic.torch as elastic_torch
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.keras.fit import FitStep
from elasticdl.elastic.keras.fit_data import FitData, check_compiled
from elasticdl.elastic.keras.loader import load, own
from elasticdl.elastic.keras.models import Model
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.ga.keras import optimizers as ga

MSE, SGD = keras.losses.MeanSquaredError, keras.optimizers.SGD
LONG, AIMS = sequences()


# -- loops --


def a_schedule_and_rules():
    optimizer = SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    member = KerasTrainee(0, Board(1), BatchPolicy(None, 10), optimizer=optimizer)
    member.state.follow(LearningRate())
    member.train()
    member.state.follow(LearningRate(scaling="linear"))


def samples_are(sample):
    load(Read(lambda index: sample), np.array([3, 1]))


# -- fit --


def fit(model=None, data=None, workers=1, **options):
    fit_together(workers, lambda rank: Fitting(model or dense(), data or FitData.of(X, Y), **options))


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest_error")
        self.kept = self.add_variable(shape=(), initializer="zeros", name="kept")

    def update_state(self, labels, outputs, sample_weight=None):
        self.kept.assign(keras.ops.maximum(self.kept, keras.ops.max(keras.ops.abs(labels - outputs))))

    def result(self):
        return self.kept


class Knows(keras.layers.Layer):
    """Sets a flag when it is called."""

    def build(self, shape):
        self.knows = self.add_weight(shape=(), dtype="bool", initializer=lambda *_, **__: False, trainable=False)

    def call(self, inputs):
        self.knows.assign(keras.ops.ones((), "bool"))
        return inputs


class Sums(keras.layers.Layer):
    """Changes a variable that Keras does not find, so that it is no weight."""

    def __init__(self):
        super().__init__()
        self.held = {"seen": tf.Variable(0.0, name="seen")}

    def call(self, inputs):
        self.held["seen"].assign_add(tf.reduce_sum(inputs))
        return inputs


def the_loss_sets_a_variable():
    seen = keras.Variable(0.0, name="seen")

    def loss(labels, outputs):
        seen.assign_add(1.0)
        return tf.square(labels - outputs)

    fit(dense(loss=loss))


def float8():
    model = dense()
    model.trainable_variables[0].overwrite_with_gradient = True
    fit(model)


def orders_that_differ():
    """A generator is drawn from where samples are read, and so differs between workers."""
    data = [Batches(draws=True), Batches(draws=True)]
    data[1].random.random(5)
    fit_together(2, lambda rank: Fitting(dense(), FitData.of(data[rank], None)))


def masks(*numbers, activity=None):
    """One output for each of the numbers that mask."""
    first = keras.Input(LONG.shape[1:])
    dense_of = partial(keras.layers.Dense, 1, activity_regularizer=activity)
    outputs = [dense_of()(keras.layers.Masking(number)(first)) for number in numbers]
    model = keras.Model(first, outputs if len(numbers) > 1 else outputs[0])
    model.compile("sgd", "mse", jit_compile=False)
    targets = [tf.constant(AIMS[:2])] * len(numbers) if len(numbers) > 1 else tf.constant(AIMS[:2])
    FitStep(model, tf.constant(LONG[:2]), targets, weighted=False).warm_up(tf.constant(LONG[:2]), targets)


def compiled(**options):
    check_compiled(dense(**options), "fit()")


def model_fit(*labels, model=None, **given):
    """As scripts call it."""
    job = FitJob()

    def call(worker):
        job.init_in_place(16)
        Model(model or dense()).fit(X, *labels or (Y,), **given)

    with pytest.MonkeyPatch.context() as patched:
        for name in KerasFit.runtimes:
            patched.setattr(name, job)
        said, _ = job.run(call)
    for error in filter(None, said):
        raise error


class Tested(keras.Model):
    def call(self, inputs):
        return inputs

    def test_step(self, data):
        return {}


def fit_tested():
    model = Tested()
    model.build((None, 6))
    model.compile("sgd", "mse")
    model_fit(X, model=model, validation_data=(X, X))


class Uneven(keras.utils.PyDataset):
    """Batches of given sizes."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, number):
        return X[: self.sizes[number]], Y[: self.sizes[number]]


def of(**given):
    """Data that ``fit`` is given."""
    return FitData.of(**{"x": X, "y": Y, **given})


OF_A_SUM = r'^fit\(\): a loss with reduction="sum" or None is a sum'
ACCUMULATES = r"^fit\(\): Model accumulates gradients by itself"
REFUSED = [
    # loops
    (lambda: TrainStep("model", None, SGD()), "the model is a str"),
    (lambda: TrainStep(make_model(), None, "sgd"), "the optimizer is a str"),
    (lambda: TrainStep(keras.Sequential([keras.layers.Dense(1)]), None, SGD()), "not built"),
    (a_schedule_and_rules, "schedule of the optimizer's own"),
    (partial(samples_are, np.zeros(3)), "a sample of Read is a ndarray; expected a pair"),
    (partial(samples_are, (1, 2, 3)), "a sample of Read is a tuple of 3"),
    # variables of model and loss
    (the_loss_sets_a_variable, "the model or the loss sets seen, which is no weight of the model"),
    (lambda: fit(dense(Knows())), "which is no weight of the model that holds numbers: keep it"),
    (float8, "computes in float8"),
    (lambda: fit_together(2, lambda rank: Fitting(dense(Sums()), FitData.of(X, Y))), r"captured\.seen"),
    # data sets
    (lambda: of(x=X.tolist()), r"fit\(x, y\): a number stands where an array belongs; make arrays of lists"),
    (lambda: of(x=[X, None]), r"fit\(x, y\): a number stands where an array belongs"),
    (lambda: of(x=X[:3]), "different numbers of samples"),
    (lambda: of(x="abc"), r"fit\(x, y\): a str can't be read by index"),
    (lambda: of(x=tf.data.Dataset.from_tensors(1)), r"fit\(x, y\): .*can't be read by index"),
    (lambda: of(x=None, y=None), r"fit\(x, y\): there are no data; give arrays x and y, or a data set as x"),
    (lambda: of(validation_data=(None, Y)), r"fit\(validation_data=\): there are no data"),
    (lambda: of(validation_data=(X, Y, Y, Y)), r"expected \(x, y\) or \(x, y, sample_weight\)"),
    (lambda: of(class_weight={0: 2.0}, sample_weight=np.ones(len(X))), "give one of them"),
    (lambda: of(y={"a": Y, "b": Y}, class_weight={0: 2.0}), "one output"),
    (lambda: of(x=Uneven(2, 2)), "within the Uneven"),
    (lambda: of(x=Uneven(2, 2), y=None, class_weight={0: 2.0}), "one output"),
    (lambda: of(x=Uneven(2, 2), y=None, validation_split=0.5), "needs arrays"),
    (lambda: of(validation_split=2.0), "expected a part of 64 samples"),
    (lambda: of(x=Uneven(0, 3), y=None), r"fit\(x\): the first batch of the Uneven is empty; expected some samples"),
    (lambda: of(x=Uneven(2, 3), y=None), r"fit\(x\): batch 1 of the Uneven has 3 samples, and the first has 2"),
    (lambda: of(x=Batches(grows_in=3), y=None).training.tell(3, 0), r"has 5 batches after on_epoch_end\(\), and had"),
    (orders_that_differ, r"in its training data sample .* \(held.order\)"),
    # what the model's `fit` is given
    (lambda: own.init(8, 4, 0), "gpus must be a whole number of at least 1, not 0"),
    (lambda: own.init(0, 4), "global_batch_size must be a whole number of at least 1, not 0"),
    (own.init, "give either global_batch_size or batch_size_per_worker"),
    (own.context, "call elastic.init"),
    (lambda: model_fit(model=keras.Sequential([keras.layers.Dense(1)])), "is not built"),
    (lambda: model_fit(model=make_model()), r"call compile\(\)"),
    (lambda: model_fit(validation_steps=2), r"fit\(validation_steps=\) is not supported"),
    (fit_tested, r"fit\(validation_data=\): Tested has a test_step\(\) of its own"),
    (
        lambda: model_fit(model=dense(loss=MSE(reduction="mean_with_sample_weight")), sample_weight=np.ones(len(X))),
        "sum_over_batch_size",
    ),
    # what is no mean, or no sum
    (lambda: fit(dense(metrics=["mae", Largest()])), r"the metric largest_error \(Largest\) can't be put together"),
    (lambda: masks(0.0, 1.0), "its outputs have different masks"),
    (lambda: masks(0.0, activity="l2"), "but not of what add_loss or a regularizer of outputs adds"),
    (lambda: compiled(loss=[MSE(reduction="sum")]), OF_A_SUM),
    (lambda: compiled(loss=MSE(reduction=None)), OF_A_SUM),
    (lambda: compiled(optimizer=SGD(gradient_accumulation_steps=2)), ACCUMULATES),
    (lambda: compiled(optimizer=keras.optimizers.LossScaleOptimizer(ga.SGD(2))), ACCUMULATES),
]


@pytest.mark.parametrize(("use", "words"), REFUSED)
def test_what_cant_be_had_is_one_line(use, words):
    refused(words, use)


@pytest.mark.parametrize("init", [own.init, elastic_torch.init], ids=["keras", "torch"])
@pytest.mark.parametrize("seed", ["a", -1, True, 2**64])
def test_a_seed_that_is_none(init, seed):
    refused(r"^elastic\.init: seed must be .* at least 0 and below 2\*\*64, not", lambda: init(8, 4, seed=seed))
