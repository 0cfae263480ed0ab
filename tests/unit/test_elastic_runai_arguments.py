"""What `fit` and `init` can't use is told in one line before anything is trained; what they can counts as with Keras."""

from functools import partial

import keras
import numpy as np
import pytest
from elastic_fit_kit import Fitting, assert_as_plain, data_of, fit_together, numbers, plainly
from refusal_kit import refused

import elasticdl.elastic.torch as elastic_torch
from elasticdl.common.errors import ArgumentError
from elasticdl.elastic.keras.driver import KerasRate
from elasticdl.elastic.keras.fit_data import FitData, FitOptions, bounded, check_weights
from elasticdl.elastic.keras.loader import own
from elasticdl.elastic.training.batch_shape import whole_number

X, Y = np.ones((6, 2), "float32"), np.zeros((6, 1), "float32")
TEXTS = np.array(["cat", "dog"] * 3)


class Batches(keras.utils.PyDataset):
    """Batches of given sizes."""

    def __init__(self, *sizes, labels=Y):
        super().__init__()
        self.sizes, self.labels = sizes, labels

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, number):
        return X[: self.sizes[number]], self.labels[: self.sizes[number]]


class Pairs:
    def __init__(self, label):
        self.label = label

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index], self.label


GOOD = {"epochs": 2, "initial_epoch": 0, "verbose": 0, "shuffle": True, "validation_freq": 1}


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("epochs", "a", "a whole number of at least 0"),
        ("epochs", None, "a whole number of at least 0"),
        ("initial_epoch", -1, "a whole number of at least 0"),
        ("validation_freq", 0, "a whole number of at least 1, or a list of epochs"),
        ("validation_freq", ["a"], "a whole number of at least 1, or a list of epochs"),
        ("validation_freq", None, "a whole number of at least 1, or a list of epochs"),
    ],
)
def test_an_option_that_cannot_be_right(name, value, right):
    said = refused("", lambda: FitOptions(**{**GOOD, name: value}), ArgumentError)
    assert said.startswith(f"fit({name}={value!r}): must be {right}")


@pytest.mark.parametrize(
    ("number", "most", "wanted"),
    [(5, None, 5), (None, None, None), (5, 2, 2), (2, 5, 2), (None, 2, 2), ("a", 2, "a"), (-1, 2, -1), (0, 2, 0)],
)
def test_keras_may_be_configured_to_do_less_than_fit_is_told(number, most, wanted):
    assert bounded(number, most) == wanted


@pytest.mark.parametrize(
    ("frequency", "wanted"),
    [(2, [1, 3]), (np.int64(2), [1, 3]), ([1, 4], [0, 3]), ({2}, [1]), (range(3, 5), [2, 3]), (np.array([2]), [1])],
)
def test_the_epochs_that_are_validated(frequency, wanted):
    options = FitOptions(**{**GOOD, "validation_freq": frequency})
    assert [epoch for epoch in range(4) if options.validates(epoch)] == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"validation_split": "a"}, "fit(validation_split='a'): must be a number of at least 0 and below 1"),
        ({"validation_split": 1}, "fit(validation_split=1): must be"),
        ({"class_weight": [1, 2]}, "fit(class_weight=[1, 2]): must be a dict of weights by the number of the class"),
        ({"class_weight": {"a": 1.0}}, "fit(class_weight={'a': 1.0}): must be"),
        ({"class_weight": {0: "a"}}, "fit(class_weight={0: 'a'}): must be"),
        ({"x": X.tolist()}, "fit(x, y): x has a float where an array belongs; make arrays of lists by numpy.array()"),
        ({"x": [X, None]}, "fit(x, y): x has nothing where an array belongs"),
        ({"x": "abc"}, "fit(x, y): a str can't be read by index"),
        ({"y": TEXTS}, "fit(x, y): y must be numbers, not"),
        ({"y": TEXTS.astype(object)}, "fit(x, y): y must be numbers, not 'cat'"),
        ({"sample_weight": TEXTS}, "fit(x, y): sample_weight must be numbers, not"),
        ({"x": None, "y": None}, "fit(x, y): there are no data; give arrays x and y, or a data set as x"),
        ({"validation_data": (None, Y)}, "fit(validation_data=): there are no data"),
        ({"x": Batches(0, 3), "y": None}, "fit(x): the first batch of the Batches is empty; expected some samples"),
        ({"x": Batches(2, 3), "y": None}, "fit(x): batch 1 of the Batches has 3 samples, and the first has 2"),
        ({"x": Pairs("cat"), "y": None}, "fit(x, y): the labels must be numbers, not"),
    ],
)
def test_data_that_cannot_be_used(given, words):
    assert refused("", lambda: FitData.of(**{"x": X, "y": Y, **given})).startswith(words)


@pytest.mark.parametrize(
    "given",
    [
        {"y": Y.astype(object)},
        {"x": np.array([b"a"] * 6)},
        {"x": [X, X]},
        {"class_weight": {np.int64(0): 2, 1.0: 0.5}},
        {"validation_split": np.float32(0.5)},
        {"x": Batches(2, 2, 1), "y": None},
        {"x": Batches(2, 0), "y": None},
    ],
)
def test_data_that_can_be_used(given):
    assert len(FitData.of(**{"x": X, "y": Y, **given}).training)


def model_of(*shape, loss="mse"):
    model = keras.Sequential([keras.Input(shape), keras.layers.Dense(3)])
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(("shape", "fits"), [((), True), ((1,), True), ((2,), False), ((1, 1), False)])
def test_there_is_one_weight_for_each_sample(shape, fits):
    x, y, weights = np.ones((6, 2)), np.ones((6, 3)), np.ones((6, *shape))
    if fits:
        FitData.of(x, y, weights).check(model_of(2))
        return
    shown = f"(samples, {', '.join(map(str, shape))})"
    expected = f"sample weights of shape {shown} don't fit the loss; expected (samples,)"
    for data, where in (
        (FitData.of(x, y, weights), "fit(x, y)"),
        (FitData.of(x, y, validation_data=(x, y, weights)), "fit(validation_data=)"),
    ):
        assert refused("", partial(data.check, model_of(2))) == f"{where}: {expected}"


def test_weights_of_time_steps_fit_a_model_that_has_them():
    check_weights("fit(x, y)", np.ones(5), model_of(5, 2))
    check_weights("fit(x, y)", np.ones(5), model_of(None, 2))
    # What a loss of one's own is multiplied by is not known.
    check_weights("fit(x, y)", np.ones(3), model_of(2, loss=lambda labels, outputs: (labels - outputs) ** 2))
    refused(r"expected \(samples,\) or \(samples, 5\)", lambda: check_weights("fit(x, y)", np.ones(4), model_of(5, 2)))


@pytest.mark.parametrize("returned", [None, "0.1", True, [0.1], {}])
def test_a_schedule_that_gives_no_rate(returned):
    rate = KerasRate(keras.optimizers.SGD(0.1))
    rate.follow(lambda epoch: returned, may_take_rate=True)
    said = refused("must return the learning rate, a number", lambda: rate(3))
    assert said.startswith(f"LearningRateScheduler: its function gave {returned!r} for epoch 3, counted from 0; ")


def test_a_schedule_is_asked_once_an_epoch():
    """It may count; and whoever comes later has the answer of the others."""
    asked = []

    def schedule(epoch, rate):
        asked.append(epoch)
        return rate / 2

    first, later = (KerasRate(keras.optimizers.SGD(1.0)) for _ in range(2))
    for each in (first, later):
        each.follow(schedule, may_take_rate=True)
    for epoch in range(2):
        first.begin_epoch(epoch)
        assert [first(epoch), first(epoch)] == [0.5 / 2**epoch] * 2
    later.load(first.kept())
    assert later(1) == 0.25
    later.begin_epoch(2)
    assert later(2) == 0.125
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("init", [own.init, elastic_torch.init], ids=["keras", "torch"])
@pytest.mark.parametrize("seed", ["a", -1, 1.5, True, None, 2**64])
def test_a_seed_that_is_none(init, seed):
    said = refused("", lambda: init(8, 4, seed=seed), ArgumentError)
    assert said == f"elastic.init: seed must be a whole number of at least 0 and below 2**64, not {seed!r}"
    assert whole_number("seed", 2**64 - 1, 0, 2**64) == 2**64 - 1


def single():
    keras.utils.set_random_seed(1)
    regular = {"kernel_regularizer": "l2", "activity_regularizer": keras.regularizers.L2(0.01)}
    layers = [keras.layers.Dense(5, "relu", **regular), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    measured = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile("adam", "sparse_categorical_crossentropy", **measured, jit_compile=False)
    return model


def double():
    keras.utils.set_random_seed(1)
    first = keras.Input((6,))
    outputs = {"a": keras.layers.Dense(3, "softmax", name="a")(first), "b": keras.layers.Dense(1, name="b")(first)}
    model = keras.Model(first, outputs)
    losses, metrics = {"a": "sparse_categorical_crossentropy", "b": "mse"}, {"a": ["accuracy"], "b": ["mae"]}
    model.compile("adam", losses, metrics=metrics, jit_compile=False)
    return model


FEATURES = numbers(60)[0]  # of which a pass is four steps
CLASSES, WEIGHTS = FEATURES[:, :3].argmax(1), np.linspace(0, 1, 60)
COLUMN = CLASSES[:, None]


@pytest.mark.parametrize(
    ("make", "labels", "data", "options"),
    [
        (single, CLASSES, {"sample_weight": WEIGHTS, "validation_split": 0.2}, {"validation_freq": [2]}),
        (single, COLUMN, {"class_weight": {0: 2.0, 2: 0.5}, "validation_data": (FEATURES, COLUMN)}, {}),
        (single, CLASSES, {}, {"steps_per_epoch": 3, "epochs": 5, "initial_epoch": 1}),
        (double, {"a": CLASSES, "b": FEATURES[:, :1]}, {"validation_split": 0.2}, {}),
    ],
    ids=["weights", "classes", "steps", "two outputs"],
)
def test_fit_gives_what_keras_gives(make, labels, data, options):
    def plateau():
        return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)]

    plain = plainly(make(), FEATURES, labels, plateau(), **data, **options)
    assert "learning_rate" in plain[0]
    members = fit_together(
        2, lambda rank: Fitting(make(), data_of(FEATURES, labels, **data), plateau(), most=5, **options)
    )
    assert_as_plain(members, plain, rtol=1e-4)
