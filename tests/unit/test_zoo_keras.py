"""The zoo's modules for Keras: what their PyTorch twins read and compute, and networks that learn."""

import importlib
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import load_module, open_datasets

ZOO = Path(__file__).parents[2] / "model_zoo"


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return importlib.import_module


def test_the_same_options_give_the_same_census(tmp_path, zoo):
    generate = zoo("census.generate").generate
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate(tmp_path / name, samples=20, seed=seed)
    a, b, c = ((tmp_path / name / "train.csv").read_text() for name in "abc")
    assert a == b != c
    assert len(a.splitlines()) == 21
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["test.csv", "train.csv"]


def test_wide_and_deep_learns_who_earns_more(tmp_path, zoo):
    zoo("census.generate").generate(tmp_path, samples=3000)
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
    model, inputs, labels = trained(module, data.training, data.evaluation, **module.model_params)
    guess = max(np.mean(labels), 1 - np.mean(labels))
    assert float(module.eval_metrics_fn()["accuracy"](labels, model(inputs, training=False))) > guess + 0.1


def trained(module, training, evaluation, **params):
    """A model after ten epochs, and what it is evaluated on."""
    keras.utils.set_random_seed(1)
    model = module.custom_model(**params)
    model.compile(module.optimizer(), module.loss)
    model.fit(*training.__getitems__(range(len(training))), batch_size=256, epochs=10, verbose=0)
    return model, *evaluation.__getitems__(range(len(evaluation)))


def test_the_digits_are_those_of_the_pytorch_twin(zoo):
    for mode in ("training", "evaluation"):
        images, labels = zoo("digits.cnn_torch").dataset(mode, "").tensors
        ours = zoo("digits.cnn_keras").dataset(mode, "")
        taken_images, taken_labels = ours.__getitems__(range(len(ours)))
        np.testing.assert_array_equal(taken_images[..., 0], images[:, 0].numpy())
        np.testing.assert_array_equal(taken_labels, labels.numpy())
    image, label = ours[3]
    assert (image.shape, int(label)) == ((8, 8, 1), int(labels[3]))


def test_the_network_learns_the_digits_and_its_dropout_is_a_parameter(zoo):
    cnn = zoo("digits.cnn_keras")
    model, images, labels = trained(cnn, *(cnn.dataset(mode, "") for mode in ("training", "evaluation")))
    metric = cnn.eval_metrics_fn()["accuracy"]
    metric.update_state(labels, model(images, training=False))
    assert float(metric.result()) >= 0.97
    steady, few = cnn.custom_model(dropout=0.0), images[:4]
    assert np.array_equal(steady(few, training=True), steady(few, training=True))
    assert not np.array_equal(model(few, training=True), model(few, training=True))


# -- ResNet20 --


@pytest.fixture
def archive(tmp_path, zoo):
    return str(zoo("cifar10.generate").generate(tmp_path, samples=50))


def given_weights_of(model, theirs):
    """The Keras model with the weights of the PyTorch one."""
    convolutions = iter([layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)])
    norms = iter([layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)])
    for module in theirs.modules():
        if isinstance(module, torch.nn.Conv2d):
            next(convolutions).set_weights([module.weight.detach().permute(2, 3, 1, 0).numpy()])
        elif isinstance(module, torch.nn.BatchNorm2d):
            values = (module.weight, module.bias, module.running_mean, module.running_var)
            next(norms).set_weights([value.detach().numpy() for value in values])
        elif isinstance(module, torch.nn.Linear):
            model.layers[-1].set_weights([module.weight.detach().T.numpy(), module.bias.detach().numpy()])
    assert next(convolutions, None) is next(norms, None) is None, "as many layers as theirs"
    return model


def test_resnet20_computes_what_the_pytorch_twin_does(zoo):
    ours, theirs = zoo("cifar10.resnet20_keras").custom_model(), zoo("cifar10.resnet20_torch").custom_model()
    trainable = sum(np.prod(weight.shape) for weight in ours.trainable_weights)
    assert trainable == sum(parameter.numel() for parameter in theirs.parameters())
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32)
    for module in theirs.modules():  # statistics that differ from channel to channel
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    expected = theirs.eval()(images).detach().numpy()
    given = given_weights_of(ours, theirs)(images.permute(0, 2, 3, 1).numpy(), training=False)
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-4)


def test_evaluation_images_are_those_of_the_pytorch_twin(zoo, archive):
    ours, theirs = (zoo(f"cifar10.resnet20_{name}").dataset("evaluation", archive) for name in ("keras", "torch"))
    assert len(ours) == len(theirs) == 10
    images, labels = ours.__getitems__([7, 2])
    for image, label, index in zip(images, labels, [7, 2], strict=True):
        np.testing.assert_allclose(image.transpose(2, 0, 1), theirs[index][0].numpy(), rtol=1e-5, atol=1e-6)
        assert label == theirs[index][1]


def test_training_images_are_shifted_and_flipped_copies(zoo, archive):
    resnet = zoo("cifar10.resnet20_keras")
    ours = resnet.dataset("training", archive)
    padded = np.pad(ours.inputs[3], ((4, 4), (4, 4), (0, 0)))
    windows = [padded[top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
    crops = {resnet._scaled(crop).tobytes() for window in windows for crop in (window, window[:, ::-1])}
    np.random.seed(1)
    drawn = ours.__getitems__([3] * 60)[0]
    assert {image.tobytes() for image in drawn} <= crops
    assert len({image.tobytes() for image in drawn}) > 30
    np.random.seed(1)
    np.testing.assert_array_equal(ours.__getitems__([3] * 60)[0], drawn)


@pytest.mark.parametrize(("mode", "message"), [("test", "mode 'test'"), ("training", "--training_data is missing")])
def test_wrong_arguments_are_refused(zoo, mode, message):
    with pytest.raises(ValueError, match=message):
        zoo("cifar10.resnet20_keras").dataset(mode, "")
