"""The digits of the model zoo: the split, and that its networks learn."""

import importlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

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


def as_rows(images: torch.Tensor) -> list[tuple[float, ...]]:
    return sorted(map(tuple, (images.flatten(1) * 16).tolist()))


def test_the_split_is_disjoint_and_covers_every_digit(cnn):
    parts = [cnn.dataset(mode, "").tensors[0] for mode in ("training", "evaluation")]
    assert [len(part) for part in parts] == [1437, 360]
    everything = as_rows(torch.from_numpy(load_digits().data).float() / 16)
    assert len(set(everything)) == 1797, "equal images would make the next comparison blind"
    assert as_rows(torch.cat(parts)) == everything


def test_the_split_is_the_same_each_time_and_stratified(cnn, mlp):
    first, second = cnn.dataset("evaluation", ""), mlp.dataset("evaluation", "")
    assert torch.equal(first.tensors[0], second.tensors[0])
    assert all(35 <= count <= 37 for count in np.bincount(first.tensors[1].numpy()))


def test_without_scikit_learn_it_is_named(zoo, monkeypatch):
    data = zoo("digits.data")

    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(data, "distribution", nothing)
    with pytest.raises(ValueError, match=r"^the digits come with scikit-learn, which is missing: pip install"):
        data.read_digits()


def test_images_keep_their_labels(cnn):
    digits = load_digits()
    label_of = dict(zip(map(tuple, digits.data.tolist()), digits.target.tolist(), strict=True))
    image, label = cnn.dataset("training", "")[17]
    assert image.shape == (1, 8, 8)
    assert label_of[tuple((image * 16).flatten().tolist())] == label


def test_scikit_learns_file_is_read_as_scikit_learn_reads_it(zoo):
    images, labels = zoo("digits.data").read_digits()
    wanted = load_digits()
    assert np.array_equal(images, wanted.data)
    assert np.array_equal(labels, wanted.target)


def test_samples_collate(cnn):
    images, labels = next(iter(DataLoader(cnn.dataset("training", ""), batch_size=5)))
    assert (images.shape, images.dtype) == ((5, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((5,), torch.int64)


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
        parts = [
            module.loss(labels[part], model(images[part])) * (len(part) / len(batch))
            for part in batch.split(micro_batch)
        ]
        total = torch.stack(parts).sum()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


def test_the_cnn_learns_the_digits_in_ten_epochs(cnn):
    torch.manual_seed(1)
    model = cnn.custom_model()
    train(cnn, model, MICRO_BATCH, epochs=10, seed=1)
    model.eval()
    images, labels = cnn.dataset("evaluation", "").tensors
    with torch.no_grad():
        assert cnn.eval_metrics_fn()["accuracy"](labels, model(images)) >= 0.97


def test_the_loss_of_the_mlp_does_not_depend_on_how_the_batch_is_cut(mlp):
    def losses(micro_batch):
        torch.manual_seed(1)
        return train(mlp, mlp.custom_model(), micro_batch, epochs=10, seed=1)

    whole = losses(GLOBAL_BATCH)
    assert whole[-1] < 0.5 * whole[0]
    assert losses(37) == pytest.approx(whole, rel=1e-5)


def test_only_the_default_cnn_drops_out(cnn):
    images = torch.rand(4, 1, 8, 8)
    steady, dropping = cnn.without_dropout().train(), cnn.custom_model().train()
    assert torch.equal(steady(images), steady(images))
    assert not torch.equal(dropping(images), dropping(images))


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_accuracy_takes_tensors_and_arrays(cnn, kind):
    outputs = kind(np.eye(4, dtype=np.float32))
    result = cnn.eval_metrics_fn()["accuracy"](kind(np.array([0, 1, 2, 0])), outputs)
    assert (type(result), result) == (float, 0.75)
