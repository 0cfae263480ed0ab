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


def test_trains_and_evaluates_as_without_the_dict(tmp_path, monkeypatch):
    make_spec, results = spec_maker(tmp_path, monkeypatch), []
    for extra in (DICTS, DICTS + "\n\ndataset = plain\n"):
        spec = make_spec(extra, num_epochs=1)
        check(spec)
        job = make_job(spec)
        job.trainer.run()
        results.append(([report.loss for report in job.script.reports], job.learner.evaluate().metrics))
    assert results[0] == results[1]
    assert results[0][0]


class Own(keras.Model):
    def call(self, features):
        return features["a"]


def functional(inputs):
    return keras.Model(inputs, keras.ops.add(*(keras.tree.flatten(inputs) * 2)[:2]))


@pytest.mark.parametrize(
    ("make", "features", "one"),
    [
        (lambda: functional(keras.Input((2,))), {"a": 5}, True),
        (lambda: functional([keras.Input((2,))]), {"a": 5}, True),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), {"a": 5}, True),
        (lambda: functional({"a": keras.Input((2,), name="a")}), {"a": 5}, False),
        (lambda: functional([keras.Input((2,)), keras.Input((2,))]), {"a": 5}, False),
        (Own, {"a": 5}, False),
        (keras.Sequential, np.ones(2), False),
        (keras.Sequential, {"a": 5, "b": 6}, False),
        (keras.Sequential, (5,), False),
    ],
)
def test_only_for_a_model_of_one_input_without_a_name_and_a_dict_of_one(make, features, one):
    given = [(features, 1)]
    data = one_feature(make(), Datasets(given, None))
    assert data.evaluation is None
    if one:
        assert data.training[0] == (5, 1)
    else:
        assert data.training is given


def test_whole_batches():
    class Many(list):
        def __getitems__(self, indices):
            return {"a": np.array(indices)}, np.array(indices)

    (inputs, labels) = OneFeature(Many()).__getitems__([3, 1])
    assert (inputs.tolist(), labels.tolist()) == ([3, 1], [3, 1])
    assert OneFeature([({"a": 5}, 0), ({"a": 6}, 1)]).__getitems__([1, 0]) == [(6, 1), (5, 0)]
