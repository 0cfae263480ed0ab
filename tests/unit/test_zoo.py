"""The model zoo: its data and what is refused of them, networks that learn, and twins that compute the same with either framework."""

import importlib
import pickle
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import torch
from refusal_kit import refused
from sklearn.datasets import load_digits

from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import load_module, open_datasets

ZOO = Path(__file__).parents[2] / "model_zoo"
FOLDERS = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}
SAMPLES = 103  # not a multiple of the five batches


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    return importlib.import_module


@pytest.fixture
def resnet(zoo):
    return zoo("cifar10.resnet20_torch")


@pytest.fixture(params=FOLDERS)
def packed(request, zoo, tmp_path):
    """An archive in one of the formats."""
    return zoo("cifar10.generate").generate(tmp_path / "data", request.param, SAMPLES, seed=3)


def unpack(archive):
    shutil.unpack_archive(archive, archive.parent)
    archive.unlink()
    return archive.parent


@pytest.mark.parametrize(
    ("module", "mode", "path", "words"),
    [
        ("digits.cnn_torch", "test", "", "mode 'test'"),
        ("digits.cnn_torch", "training", "/data", "/data: "),
        ("cifar10.resnet20_torch", "test", "x", "mode 'test'"),
        ("cifar10.resnet20_torch", "evaluation", "", "--validation_data is missing"),
        ("cifar10.resnet20_keras", "test", "", "mode 'test'"),
        ("cifar10.resnet20_keras", "training", "", "--training_data is missing"),
    ],
)
def test_wrong_arguments_are_refused(zoo, module, mode, path, words):
    refused(words, lambda: zoo(module).dataset(mode, path), ValueError)


# -- CIFAR-10 --


def test_both_formats_packed_or_not_give_the_same_samples(resnet, zoo, tmp_path):
    seen = []
    for fmt, folder in FOLDERS.items():
        archive = zoo("cifar10.generate").generate(tmp_path / fmt, fmt, SAMPLES, seed=3)
        for place in (archive, archive.parent, unpack(archive) / folder):
            where = str(place if place.exists() else place.parent)
            seen.append([resnet.dataset(mode, where) for mode in ("training", "evaluation")])
    training, evaluation = seen[0]
    assert (training.images.shape, len(training.labels)) == ((SAMPLES, 3, 32, 32), SAMPLES)
    assert len(evaluation.images) == SAMPLES // 5
    for ours, theirs in ((ours, theirs) for other in seen[1:] for ours, theirs in zip(seen[0], other, strict=True)):
        assert torch.equal(ours.images, theirs.images)
        assert ours.labels == theirs.labels
    # As Python 2 wrote it.
    folder = tmp_path / "python" / FOLDERS["python"]
    batches = {f"data_batch_{number}" for number in range(1, 6)}
    assert {path.name for path in folder.iterdir()} == {*batches, "test_batch", "batches.meta"}
    batch = pickle.loads((folder / "data_batch_2").read_bytes(), encoding="bytes")
    assert set(batch) == {b"batch_label", b"labels", b"data", b"filenames"}
    data, labels = batch[b"data"], batch[b"labels"]
    assert (data.dtype, data.shape, type(labels), len(labels)) == (np.uint8, (21, 3072), list, 21)


def evaluate(resnet, path):
    return resnet.dataset("evaluation", str(path))


def write_batch(folder, batch):
    (folder / "data_batch_1").touch()
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))


def test_a_batch_written_by_todays_python_is_read(resnet, tmp_path):
    data = np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072).astype(np.uint8)
    write_batch(tmp_path, {b"data": data, b"labels": [3, 9]})
    found = evaluate(resnet, tmp_path)
    assert found.labels == [3, 9]
    assert np.array_equal(found.images.numpy().reshape(2, 3072), data)


class Malicious:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


def test_a_malicious_pickle_is_refused_and_not_run(resnet, tmp_path):
    victim = tmp_path / "victim"
    write_batch(tmp_path, {b"data": Malicious(victim), b"labels": []})
    pickle.loads((tmp_path / "test_batch").read_bytes())
    assert victim.exists(), "the pickle has to be harmful for the test to mean anything"
    victim.unlink()
    refused(r"test_batch: .*no CIFAR-10 file needs", lambda: evaluate(resnet, tmp_path), ValueError)
    assert not victim.exists()


def refuse(resnet, path, named):
    assert str(named) in refused(r"expected|cut short", lambda: evaluate(resnet, path), ValueError)


@pytest.mark.parametrize("keep", [0.0, 0.51, 0.999])
def test_an_archive_or_a_batch_cut_short_or_missing_is_refused(resnet, packed, keep):
    whole = packed.read_bytes()
    packed.write_bytes(whole[: int(len(whole) * keep * 0.99)])
    refuse(resnet, packed, packed)
    packed.write_bytes(whole)
    batch = next(unpack(packed).glob("*/test_batch*"))
    whole = batch.read_bytes()
    batch.write_bytes(whole[: int(len(whole) * keep)])
    refuse(resnet, batch.parent, batch)
    batch.unlink()
    refuse(resnet, batch.parent, "test_batch")
    (batch.parents[1] / "notes.txt").write_text("no archive")
    for path in (batch.parents[1] / "absent", batch.parents[1] / "notes.txt"):
        refuse(resnet, path, path)


IMAGES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({b"data": IMAGES, b"fine_labels": [0, 1]}, "b'labels'"),
        ({b"data": IMAGES.astype(np.float32), b"labels": [0, 1]}, "uint8"),
        ({b"data": IMAGES, b"labels": [0]}, "1 labels"),
        ({b"data": IMAGES, b"labels": [0, 10]}, "expected 0 to 9"),
        ({b"data": IMAGES[:1], b"labels": [b"cat"]}, "whole numbers"),
        ([1, 2], "a dict"),
    ],
)
def test_a_pickle_of_something_else_is_refused(resnet, tmp_path, batch, message):
    write_batch(tmp_path, batch)
    refused(message, lambda: evaluate(resnet, tmp_path), ValueError)


def test_training_images_are_crops_and_flips_drawn_from_the_frameworks_generator(resnet, zoo, packed):
    of_keras = zoo("cifar10.resnet20_keras")
    torchs, kerass = (each.dataset("training", str(packed)) for each in (resnet, of_keras))

    def drawn():
        torch.manual_seed(5)
        np.random.seed(5)
        return torch.stack([torchs[3][0] for _ in range(60)]), kerass.__getitems__([3] * 60)[0]

    first, again = drawn(), drawn()
    assert all(map(np.array_equal, first, again))
    margin = np.pad(kerass.inputs[3], ((4, 4), (4, 4), (0, 0)))
    windows = [margin[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    views = [view for window in windows for view in (window, window[:, ::-1])]
    raw = (first[0] * resnet.DEVIATION + resnet.MEAN).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    for images, allowed in ((raw.numpy(), views), (first[1], map(of_keras._scaled, views))):
        found = {image.tobytes() for image in images}
        assert found <= {view.tobytes() for view in allowed}
        assert len(found) > 30


def test_evaluation_images_are_those_of_the_pytorch_twin(zoo, packed):
    ours, theirs = (zoo(f"cifar10.resnet20_{name}").dataset("evaluation", str(packed)) for name in ("keras", "torch"))
    assert len(ours) == len(theirs) == SAMPLES // 5
    images, labels = ours.__getitems__([7, 2])
    for image, label, index in zip(images, labels, [7, 2], strict=True):
        np.testing.assert_allclose(image.transpose(2, 0, 1), theirs[index][0].numpy(), rtol=1e-5, atol=1e-6)
        assert label == theirs[index][1]


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


def test_resnet20_is_the_one_of_the_paper_and_its_twin_computes_the_same(zoo, resnet):
    ours, theirs = zoo("cifar10.resnet20_keras").custom_model(), resnet.custom_model()
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 269_722
    assert sum(np.prod(weight.shape) for weight in ours.trainable_weights) == 269_722
    assert sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in theirs.modules()) == 20
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32)
    for module in theirs.modules():  # statistics that differ from channel to channel
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    expected = theirs.eval()(images).detach().numpy()
    given = given_weights_of(ours, theirs)(images.permute(0, 2, 3, 1).numpy(), training=False)
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("framework", "of_horovod"), [("torch", "torch"), ("keras", "tensorflow")])
def test_the_callback_multiplies_the_published_schedule_by_the_number_of_workers(
    zoo, monkeypatch, framework, of_horovod
):
    epochs = {0: 1e-3, 35: 1e-3, 36: 5e-4, 41: 2e-4, 60: 2e-4, 61: 1e-4, 80: 1e-4, 81: 1e-5}
    sized, callbacks = SimpleNamespace(size=lambda: 3), SimpleNamespace(LearningRateScheduler=lambda schedule: schedule)
    horovod = SimpleNamespace(**{of_horovod: sized})
    for name, module in {"horovod": horovod, f"horovod.{of_horovod}": sized, "elasticdl.callbacks": callbacks}.items():
        monkeypatch.setitem(sys.modules, name, module)
    (schedule,) = zoo(f"cifar10.resnet20_{framework}").callbacks()
    assert {epoch: schedule(epoch) / 3 for epoch in epochs} == pytest.approx(epochs)


def test_the_generator_is_a_command_and_repeats_itself(zoo, tmp_path):
    def run(out, *more):
        command = [sys.executable, ZOO / "cifar10" / "generate.py", "--out", out, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    done = run(tmp_path / "a", "--samples", "50")
    made = tmp_path / "a" / "cifar-10-python.tar.gz"
    assert (done.returncode, done.stdout.strip()) == (0, str(made))
    assert [*made.parent.iterdir()] == [made]
    same, other = (zoo("cifar10.generate").generate(tmp_path / str(seed), samples=50, seed=seed) for seed in (0, 1))
    assert made.read_bytes() == same.read_bytes() != other.read_bytes()
    refusal = run(tmp_path / "d", "--samples", "4")
    assert refusal.returncode == 2
    assert "at least 5" in refusal.stderr


# -- the digits --


def test_the_split_is_disjoint_covers_every_digit_is_stratified_and_the_same_for_all(zoo):
    digits = load_digits()
    label_of = {tuple(image): label for image, label in zip(digits.data.tolist(), digits.target.tolist(), strict=True)}
    assert len(label_of) == 1797, "equal images would make the next comparison blind"
    parts = [zoo("digits.cnn_torch").dataset(mode, "").tensors for mode in ("training", "evaluation")]
    assert [len(images) for images, _ in parts] == [1437, 360]
    found = {
        tuple(row): label
        for images, labels in parts
        for row, label in zip((images.flatten(1) * 16).tolist(), labels.tolist(), strict=True)
    }
    assert found == label_of
    images, labels = parts[1]
    assert all(35 <= count <= 37 for count in np.bincount(labels.numpy()))
    assert (images.shape[1:], images.dtype, labels.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert torch.equal(zoo("digits.mlp_torch").dataset("evaluation", "").tensors[0], images)
    for mode, (images, labels) in zip(("training", "evaluation"), parts, strict=True):
        ours = zoo("digits.cnn_keras").dataset(mode, "")
        taken_images, taken_labels = ours.__getitems__(range(len(ours)))
        np.testing.assert_array_equal(taken_images[..., 0], images[:, 0].numpy())
        np.testing.assert_array_equal(taken_labels, labels.numpy())
    assert (ours[3][0].shape, int(ours[3][1])) == ((8, 8, 1), int(labels[3]))


def test_without_scikit_learn_it_is_named(zoo, monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(zoo("digits.data"), "distribution", nothing)
    words = r"^the digits come with scikit-learn, which is missing: pip install"
    refused(words, zoo("digits.data").read_digits, ValueError)


def test_the_cnn_learns_the_digits_in_ten_epochs_and_drops_out_unless_it_is_steady(zoo):
    cnn = zoo("digits.cnn_torch")
    torch.manual_seed(1)
    model = cnn.custom_model()
    images, labels = cnn.dataset("training", "").tensors
    optimizer = cnn.optimizer(model.parameters())
    for batch in (batch for _ in range(10) for batch in torch.randperm(len(labels)).split(256)):
        optimizer.zero_grad()
        cnn.loss(labels[batch], model(images[batch])).backward()
        optimizer.step()
    images, labels = cnn.dataset("evaluation", "").tensors
    steady = cnn.without_dropout().train()
    assert torch.equal(steady(images), steady(images))
    assert not torch.equal(model(images), model(images))
    model.eval()
    with torch.no_grad():
        assert cnn.eval_metrics_fn()["accuracy"](labels, model(images)) >= 0.97


def trained(module, training, evaluation, **params):
    """A model of Keras after ten epochs, what it is evaluated on, and how well."""
    keras.utils.set_random_seed(1)
    model = module.custom_model(**params)
    model.compile(module.optimizer(), module.loss)
    model.fit(*training.__getitems__(range(len(training))), batch_size=256, epochs=10, verbose=0)
    inputs, labels = evaluation.__getitems__(range(len(evaluation)))
    metric = module.eval_metrics_fn()["accuracy"]
    outputs = model(inputs, training=False)
    if isinstance(metric, keras.metrics.Metric):
        metric.update_state(labels, outputs)
        return model, inputs, labels, float(metric.result())
    return model, inputs, labels, float(metric(labels, outputs))


def test_the_network_of_keras_learns_the_digits_and_its_dropout_is_a_parameter(zoo):
    cnn = zoo("digits.cnn_keras")
    model, images, _, accuracy = trained(cnn, *(cnn.dataset(mode, "") for mode in ("training", "evaluation")))
    assert accuracy >= 0.97
    steady, few = cnn.custom_model(dropout=0.0), images[:4]
    assert np.array_equal(steady(few, training=True), steady(few, training=True))
    assert not np.array_equal(model(few, training=True), model(few, training=True))


# -- the census --


def test_wide_and_deep_learns_who_earns_more(tmp_path, zoo):
    generate = zoo("census.generate").generate
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate(tmp_path / name, samples=20, seed=seed)
    a, b, c = ((tmp_path / name / "train.csv").read_text() for name in "abc")
    assert a == b != c
    generate(tmp_path, samples=3000)
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
    *_, labels, accuracy = trained(module, data.training, data.evaluation, **module.model_params)
    assert accuracy > max(np.mean(labels), 1 - np.mean(labels)) + 0.1
