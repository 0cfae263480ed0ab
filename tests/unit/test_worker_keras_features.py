"""A dict of one feature for a model of one input: its value is handed over; whatever else the user gives stays."""

import keras
import numpy as np
import pytest
from worker_keras_kit import make_job, spec_maker

from elasticdl.worker.check import check
from elasticdl.worker.keras_learner import OneFeature, one_feature
from elasticdl.worker.zoo import Datasets

DICTS = """

plain = dataset


class Named(Samples):
    def __getitem__(self, index):
        inputs, labels = super().__getitem__(index)
        return {"image": inputs}, labels


def dataset(mode, path):
    return Named(40, 1) if mode == "training" else Named(10, 2)


def custom_model():
    inputs = keras.Input((2,), name="x")
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
"""


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    return spec_maker(tmp_path, monkeypatch)


def test_trains_and_evaluates_as_without_the_dict(make_spec):
    results = []
    for extra in (DICTS, DICTS + "\n\ndataset = plain\n"):
        spec = make_spec(extra, num_epochs=1)
        check(spec)
        job = make_job(spec)
        job.trainer.run()
        evaluation = job.learner.evaluate()
        results.append(([report.loss for report in job.script.reports], evaluation.metrics))
    assert results[0] == results[1]
    assert results[0][0]


class Own(keras.Model):
    def call(self, features):
        return features["a"]


def functional(inputs):
    return keras.Model(inputs, keras.ops.add(*(keras.tree.flatten(inputs) * 2)[:2]))


@pytest.mark.parametrize(
    ("make", "one"),
    [
        (lambda: functional(keras.Input((2,))), True),
        (lambda: functional([keras.Input((2,))]), True),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), True),
        (lambda: functional({"a": keras.Input((2,), name="a")}), False),
        (lambda: functional([keras.Input((2,)), keras.Input((2,))]), False),
        (Own, False),
    ],
)
def test_only_for_a_model_of_one_input_without_a_name(make, one):
    given = [({"a": np.ones(2)}, 1)]
    data = one_feature(make(), Datasets(given, None))
    assert isinstance(data.training, OneFeature) is one
    assert data.evaluation is None
    features, label = data.training[0]
    assert isinstance(features, dict) is not one
    assert label == 1


@pytest.mark.parametrize("features", [np.ones(2), {"a": np.ones(2), "b": np.ones(2)}, (np.ones(2),)])
def test_other_features_stay(features):
    given = [(features, 1)]
    assert one_feature(keras.Sequential(), Datasets(given, given)).training is given


def test_whole_batches():
    class Many(list):
        def __getitems__(self, indices):
            return {"a": np.array(indices)}, np.array(indices)

    (inputs, labels) = OneFeature(Many()).__getitems__([3, 1])
    assert (inputs.tolist(), labels.tolist()) == ([3, 1], [3, 1])
    assert OneFeature([({"a": 5}, 0), ({"a": 6}, 1)]).__getitems__([1, 0]) == [(6, 1), (5, 0)]
