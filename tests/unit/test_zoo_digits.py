"""The digits of the model zoo: the split, and that its networks learn."""

import importlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

ZOO = Path(__file__).parents[2] / "model_zoo"
MICRO_BATCH, GLOBAL_BATCH = 64, 256


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return importlib.import_module


@pytest.fixture
def cnn(zoo) -> ModuleType:
    return zoo("digits.cnn_torch")


@pytest.fixture
def mlp(zoo) -> ModuleType:
    return zoo("digits.mlp_torch")


def test_the_split_is_disjoint_covers_every_digit_and_is_stratified(cnn, mlp):
    digits = load_digits()
    label_of = {tuple(image): label for image, label in zip(digits.data.tolist(), digits.target.tolist(), strict=True)}
    assert len(label_of) == 1797, "equal images would make the next comparison blind"
    parts = [cnn.dataset(mode, "").tensors for mode in ("training", "evaluation")]
    assert [len(images) for images, _ in parts] == [1437, 360]
    found = {
        tuple(row): label
        for images, labels in parts
        for row, label in zip((images.flatten(1) * 16).tolist(), labels.tolist(), strict=True)
    }
    assert found == label_of
    images, labels = parts[1]
    assert torch.equal(mlp.dataset("evaluation", "").tensors[0], images)
    assert all(35 <= count <= 37 for count in np.bincount(labels.numpy()))
    assert (images.shape[1:], images.dtype, labels.dtype) == ((1, 8, 8), torch.float32, torch.int64)


def test_without_scikit_learn_it_is_named(zoo, monkeypatch):
    data = zoo("digits.data")

    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(data, "distribution", nothing)
    with pytest.raises(ValueError, match=r"^the digits come with scikit-learn, which is missing: pip install"):
        data.read_digits()


@pytest.mark.parametrize(("mode", "path", "message"), [("test", "", "mode 'test'"), ("training", "/data", "/data: ")])
def test_wrong_arguments_are_refused(cnn, mode, path, message):
    with pytest.raises(ValueError, match=message):
        cnn.dataset(mode, path)


def train(module: ModuleType, model: torch.nn.Module, micro_batch: int, epochs: int, seed: int) -> list[float]:
    """The losses of the steps, as an elastic job computes them: accumulated over micro-batches."""
    images, labels = module.dataset("training", "").tensors
    optimizer = module.optimizer(model.parameters())
    order = torch.Generator().manual_seed(seed)
    losses = []
    for batch in (b for _ in range(epochs) for b in torch.randperm(len(labels), generator=order).split(GLOBAL_BATCH)):
        optimizer.zero_grad()
        parts = batch.split(micro_batch)
        losses.append(sum(module.loss(labels[part], model(images[part])) * (len(part) / len(batch)) for part in parts))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def test_the_cnn_learns_the_digits_in_ten_epochs_and_drops_out_unless_it_is_steady(cnn):
    torch.manual_seed(1)
    model = cnn.custom_model()
    train(cnn, model, MICRO_BATCH, epochs=10, seed=1)
    images, labels = cnn.dataset("evaluation", "").tensors
    steady = cnn.without_dropout().train()
    assert torch.equal(steady(images), steady(images))
    assert not torch.equal(model(images), model(images))
    model.eval()
    with torch.no_grad():
        assert cnn.eval_metrics_fn()["accuracy"](labels, model(images)) >= 0.97


def test_the_loss_of_the_mlp_does_not_depend_on_how_the_batch_is_cut(mlp):
    def losses(micro_batch):
        torch.manual_seed(1)
        return train(mlp, mlp.custom_model(), micro_batch, epochs=10, seed=1)

    whole = losses(GLOBAL_BATCH)
    assert whole[-1] < 0.5 * whole[0]
    assert losses(37) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_accuracy_takes_tensors_and_arrays(cnn, kind):
    outputs = kind(np.eye(4, dtype=np.float32))
    result = cnn.eval_metrics_fn()["accuracy"](kind(np.array([0, 1, 2, 0])), outputs)
    assert (type(result), result) == (float, 0.75)
