"""The census table, and the wide and deep network over it."""

import importlib
from pathlib import Path

import keras
import numpy as np
import pytest

from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import load_module, open_datasets

ZOO = Path(__file__).parents[2] / "model_zoo"


@pytest.fixture
def census(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return lambda name: importlib.import_module(f"census.{name}")


def test_the_same_options_give_the_same_files(tmp_path, census):
    generate = census("generate").generate
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate(tmp_path / name, samples=20, seed=seed)
    a, b, c = ((tmp_path / name / "train.csv").read_text() for name in "abc")
    assert a == b != c
    assert len(a.splitlines()) == 21
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["test.csv", "train.csv"]


def test_it_learns_who_earns_more(tmp_path, census):
    census("generate").generate(tmp_path, samples=3000)
    spec = JobSpec(
        model_zoo=str(ZOO),
        model_def="census.wide_deep_keras.custom_model",
        model_params="hidden=16",
        training_data=str(tmp_path / "train.csv"),
        validation_data=str(tmp_path / "test.csv"),
    )
    module = load_module(spec)
    data = open_datasets(module, spec)
    assert (len(data.training), len(data.evaluation)) == (3000, 600)
    keras.utils.set_random_seed(1)
    model = module.custom_model(**module.model_params)
    model.compile(module.optimizer(), module.loss)
    inputs, labels = data.training.__getitems__(range(3000))
    model.fit(inputs, labels, batch_size=256, epochs=10, verbose=0)
    inputs, labels = data.evaluation.__getitems__(range(600))
    outputs = np.asarray(model(inputs, training=False))
    guess = max(np.mean(labels), 1 - np.mean(labels))
    assert float(module.eval_metrics_fn()["accuracy"](labels, outputs)) > guess + 0.1
