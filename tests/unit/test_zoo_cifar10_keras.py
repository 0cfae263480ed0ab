"""The Keras ResNet20: the function that the PyTorch twin computes, on the data that it reads."""

import importlib
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

ZOO = Path(__file__).parents[2] / "model_zoo"


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return lambda name: importlib.import_module(f"cifar10.{name}")


@pytest.fixture
def archive(tmp_path, zoo):
    return str(zoo("generate").generate(tmp_path, samples=50))


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


def test_it_computes_what_the_pytorch_twin_does(zoo):
    ours, theirs = zoo("resnet20_keras").custom_model(), zoo("resnet20_torch").custom_model()
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
    ours = zoo("resnet20_keras").dataset("evaluation", archive)
    theirs = zoo("resnet20_torch").dataset("evaluation", archive)
    assert len(ours) == len(theirs) == 10
    images, labels = ours.__getitems__([7, 2])
    for image, label, index in zip(images, labels, [7, 2], strict=True):
        np.testing.assert_allclose(image.transpose(2, 0, 1), theirs[index][0].numpy(), rtol=1e-5, atol=1e-6)
        assert label == theirs[index][1]


def test_training_images_are_shifted_and_flipped_copies(zoo, archive):
    resnet = zoo("resnet20_keras")
    ours = resnet.dataset("training", archive)
    padded = np.pad(ours.inputs[3], ((4, 4), (4, 4), (0, 0)))
    crops = {
        resnet._scaled(crop).tobytes()
        for top in range(9)
        for left in range(9)
        for crop in (padded[top : top + 32, left : left + 32], padded[top : top + 32, left : left + 32][:, ::-1])
    }
    np.random.seed(1)
    drawn = ours.__getitems__([3] * 60)[0]
    assert {image.tobytes() for image in drawn} <= crops
    assert len({image.tobytes() for image in drawn}) > 30
    np.random.seed(1)
    np.testing.assert_array_equal(ours.__getitems__([3] * 60)[0], drawn)


@pytest.mark.parametrize(("mode", "message"), [("test", "mode 'test'"), ("training", "--training_data is missing")])
def test_wrong_arguments_are_refused(zoo, mode, message):
    with pytest.raises(ValueError, match=message):
        zoo("resnet20_keras").dataset(mode, "")
