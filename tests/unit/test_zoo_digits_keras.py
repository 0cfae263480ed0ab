"""The Keras digits: the same data as the PyTorch twin's, and a network that learns them."""

import importlib
from pathlib import Path

import keras
import numpy as np
import pytest

ZOO = Path(__file__).parents[2] / "model_zoo"


@pytest.fixture
def cnn(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return importlib.import_module("digits.cnn_keras")


def test_the_data_is_that_of_the_pytorch_twin(cnn):
    torch_twin = importlib.import_module("digits.cnn_torch")
    for mode in ("training", "evaluation"):
        images, labels = torch_twin.dataset(mode, "").tensors
        ours = cnn.dataset(mode, "")
        assert len(ours) == len(labels)
        taken_images, taken_labels = ours.__getitems__(range(len(ours)))
        np.testing.assert_array_equal(taken_images[..., 0], images[:, 0].numpy())
        np.testing.assert_array_equal(taken_labels, labels.numpy())
    image, label = ours[3]
    assert (image.shape, int(label)) == ((8, 8, 1), int(labels[3]))


def test_the_network_learns_the_digits_in_ten_epochs(cnn):
    keras.utils.set_random_seed(1)
    model = cnn.custom_model()
    model.compile(cnn.optimizer(), cnn.loss)
    training = cnn.dataset("training", "")
    model.fit(*training.__getitems__(range(len(training))), batch_size=256, epochs=10, verbose=0)
    held_out = cnn.dataset("evaluation", "")
    images, labels = held_out.__getitems__(range(len(held_out)))
    metric = cnn.eval_metrics_fn()["accuracy"]
    metric.update_state(labels, model(images, training=False))
    assert float(metric.result()) >= 0.97


def test_the_size_of_the_dropout_is_a_parameter(cnn):
    images = np.random.default_rng(0).random((4, 8, 8, 1), np.float32)
    steady, dropping = cnn.custom_model(dropout=0.0), cnn.custom_model()
    assert np.array_equal(steady(images, training=True), steady(images, training=True))
    assert not np.array_equal(dropping(images, training=True), dropping(images, training=True))
