"""What `fit` and `init` can't use is told in one line before anything is trained; what they can counts as with Keras."""

import keras
import numpy as np
import pytest
from elastic_fit_kit import Fitting, assert_as_plain, data_of, fit_together, numbers, plainly
from refusal_kit import refused

import elasticdl.elastic.torch as elastic_torch
from elasticdl.common.errors import ArgumentError
from elasticdl.elastic.keras.fit import FitCall
from elasticdl.elastic.keras.fit_data import FitData
from elasticdl.elastic.keras.loader import own
from elasticdl.elastic.training.batch_shape import whole_number

X, Y = np.ones((6, 2), "float32"), np.zeros((6, 1), "float32")


class Batches(keras.utils.PyDataset):
    """Batches of given sizes."""

    def __init__(self, *sizes, labels=Y):
        super().__init__()
        self.sizes, self.labels = sizes, labels

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, number):
        return X[: self.sizes[number]], self.labels[: self.sizes[number]]


@pytest.mark.parametrize(
    ("frequency", "wanted"),
    [(2, [1, 3]), (np.int64(2), [1, 3]), ([1, 4], [0, 3]), ({2}, [1]), (range(3, 5), [2, 3]), (np.array([2]), [1])],
)
def test_the_epochs_that_are_validated(frequency, wanted):
    given = FitCall(None, [], epochs=2, initial_epoch=0, verbose=0, shuffle=True, validation_freq=frequency)
    assert [epoch for epoch in range(4) if given.validates(epoch)] == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": X.tolist()}, "fit(x, y): a number stands where an array belongs; make arrays of lists by numpy.array()"),
        ({"x": [X, None]}, "fit(x, y): a number stands where an array belongs"),
        ({"x": "abc"}, "fit(x, y): a str can't be read by index"),
        ({"x": None, "y": None}, "fit(x, y): there are no data; give arrays x and y, or a data set as x"),
        ({"validation_data": (None, Y)}, "fit(validation_data=): there are no data"),
        ({"x": Batches(0, 3), "y": None}, "fit(x): the first batch of the Batches is empty; expected some samples"),
        ({"x": Batches(2, 3), "y": None}, "fit(x): batch 1 of the Batches has 3 samples, and the first has 2"),
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
        (single, CLASSES, {}, {"steps_per_epoch": 3, "epochs": 6, "initial_epoch": 2}),
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
