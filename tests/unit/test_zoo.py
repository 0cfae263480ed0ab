"""The model zoo: its data and what is refused of them, and networks that learn."""

import importlib
import pickle
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from refusal_kit import refused

from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import load_module, open_datasets

ZOO = Path(__file__).parents[2] / "model_zoo"
FOLDERS = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}
SAMPLES = 103  # not a multiple of the five batches


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return importlib.import_module


# -- CIFAR-10 --


def test_both_formats_packed_or_not_give_the_same_samples_with_either_framework(zoo, tmp_path):
    resnet, of_keras, generate = map(zoo, ("cifar10.resnet20_torch", "cifar10.resnet20_keras", "cifar10.generate"))
    seen = []
    for fmt, folder in FOLDERS.items():
        archive = generate.generate(tmp_path / fmt, fmt, SAMPLES, seed=3)
        seen.append([resnet.dataset(mode, str(archive)) for mode in ("training", "evaluation")])
        shutil.unpack_archive(archive, archive.parent)
        seen.append([resnet.dataset(mode, str(archive.parent / folder)) for mode in ("training", "evaluation")])
    training, evaluation = seen[0]
    assert (training.images.shape, len(training.labels)) == ((SAMPLES, 3, 32, 32), SAMPLES)
    assert len(evaluation.images) == SAMPLES // 5
    for ours, theirs in ((ours, theirs) for other in seen[1:] for ours, theirs in zip(seen[0], other, strict=True)):
        assert torch.equal(ours.images, theirs.images)
        assert ours.labels == theirs.labels
    images, labels = of_keras.dataset("evaluation", str(archive)).__getitems__([7, 2])
    for image, label, index in zip(images, labels, [7, 2], strict=True):
        np.testing.assert_allclose(image.transpose(2, 0, 1), evaluation[index][0].numpy(), rtol=1e-5, atol=1e-6)
        assert label == evaluation[index][1]
    other = generate.generate(tmp_path / "other", fmt, SAMPLES, seed=4)
    assert archive.read_bytes() != other.read_bytes()


class Malicious:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


def test_a_pickle_is_read_without_running_what_is_in_it_and_half_a_batch_is_refused(zoo, tmp_path):
    def evaluate():
        return zoo("cifar10.resnet20_torch").dataset("evaluation", str(tmp_path))

    victim, file = tmp_path / "victim", tmp_path / "test_batch"
    (tmp_path / "data_batch_1").touch()
    file.write_bytes(pickle.dumps({b"data": Malicious(victim), b"labels": []}))
    refused("test_batch: .*no CIFAR-10 file needs", evaluate, ValueError)
    assert not victim.exists()
    images = np.zeros((2, 3072), np.uint8)
    for batch, words in (([1, 2], "a dict"), ({b"data": images, b"labels": [0]}, "1 labels")):
        file.write_bytes(pickle.dumps(batch))
        refused(words, evaluate, ValueError)
    whole = pickle.dumps({b"data": images, b"labels": [3, 9]}, protocol=4)
    file.write_bytes(whole[:-1])
    refused("test_batch: .*cut short", evaluate, ValueError)
    file.write_bytes(whole)
    assert evaluate().labels == [3, 9]


# -- the census --


@pytest.mark.slow
def test_wide_and_deep_learns_who_earns_more(tmp_path, zoo):
    zoo("census.generate").generate(tmp_path, samples=3000)
    data = {"training_data": str(tmp_path / "train.csv"), "validation_data": str(tmp_path / "test.csv")}
    model_def = "census.wide_deep_keras.custom_model"
    spec = JobSpec(model_zoo=str(ZOO), model_def=model_def, model_params="hidden=16", **data)
    module = load_module(spec)
    training, evaluation = (data := open_datasets(module, spec)).training, data.evaluation
    assert (len(training), len(evaluation)) == (3000, 600)
    keras.utils.set_random_seed(1)
    model = module.custom_model(**module.model_params)
    model.compile(module.optimizer(), module.loss)
    model.fit(*training.__getitems__(range(3000)), batch_size=256, epochs=10, verbose=0)
    inputs, labels = evaluation.__getitems__(range(600))
    accuracy = float(module.eval_metrics_fn()["accuracy"](labels, model(inputs, training=False)))
    assert accuracy > max(np.mean(labels), 1 - np.mean(labels)) + 0.1
