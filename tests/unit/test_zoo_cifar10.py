"""CIFAR-10 in the model zoo: its archives, ResNet20, and what is refused."""

import importlib
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

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


def unpack(archive: Path) -> Path:
    shutil.unpack_archive(archive, archive.parent)
    archive.unlink()
    return archive.parent


def content(data) -> tuple[torch.Tensor, list[int]]:
    return data.images, data.labels


def test_both_formats_packed_or_not_give_the_same_samples(resnet, zoo, tmp_path):
    generate, seen = zoo("cifar10.generate").generate, []
    for fmt, folder in FOLDERS.items():
        archive = generate(tmp_path / fmt, fmt, SAMPLES, seed=3)
        for place in (archive, archive.parent):
            seen.append([content(resnet.dataset(mode, str(place))) for mode in ("training", "evaluation")])
        holder = unpack(archive)
        for place in (holder, holder / folder):
            seen.append([content(resnet.dataset(mode, str(place))) for mode in ("training", "evaluation")])
    (images, labels), (test_images, _) = seen[0]
    assert len(seen) == 8
    assert images.shape == (SAMPLES, 3, 32, 32)
    assert len(labels) == SAMPLES
    assert len(test_images) == SAMPLES // 5
    for other in seen[1:]:
        for (left, left_labels), (right, right_labels) in zip(seen[0], other, strict=True):
            assert torch.equal(left, right)
            assert left_labels == right_labels


@pytest.mark.parametrize("encoding", ["bytes", "latin1"])
def test_the_python_version_is_what_python_2_wrote(zoo, tmp_path, encoding):
    folder = unpack(zoo("cifar10.generate").generate(tmp_path, "python", SAMPLES)) / FOLDERS["python"]

    def key(name):
        return name.encode() if encoding == "bytes" else name

    names = {path.name for path in folder.iterdir()}
    assert names == {*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"}
    batch = pickle.loads((folder / "data_batch_2").read_bytes(), encoding=encoding)
    assert set(batch) == {key("batch_label"), key("labels"), key("data"), key("filenames")}
    assert batch[key("batch_label")] == key("training batch 2 of 5")
    data, labels = batch[key("data")], batch[key("labels")]
    assert (data.dtype, data.shape) == (np.uint8, (21, 3072))
    assert data.flags.c_contiguous
    assert (type(labels), len(labels)) == (list, 21)
    meta = pickle.loads((folder / "batches.meta").read_bytes(), encoding=encoding)
    assert meta[key("label_names")][0] == key("airplane")
    assert meta[key("num_vis")] == 3072


def test_the_binary_version_has_records_of_a_label_and_3072_bytes(resnet, zoo, tmp_path):
    folder = unpack(zoo("cifar10.generate").generate(tmp_path, "binary", SAMPLES)) / FOLDERS["binary"]
    assert (folder / "data_batch_1.bin").stat().st_size == 21 * 3073
    assert (folder / "batches.meta.txt").read_text().split()[9] == "truck"
    record = bytearray((folder / "test_batch.bin").read_bytes()[:3073])
    record[0], record[1], record[1 + 1024 + 32 + 5] = 7, 11, 22  # red of the first pixel; green of row 1, column 5
    (folder / "test_batch.bin").write_bytes(record)
    data = resnet.dataset("evaluation", str(folder))
    assert data.labels == [7]
    assert (data.images[0, 0, 0, 0], data.images[0, 1, 1, 5]) == (11, 22)


def test_a_batch_written_by_todays_python_is_read(resnet, tmp_path):
    data = np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072).astype(np.uint8)
    (tmp_path / "data_batch_1").touch()
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": data, b"labels": [3, 9]}, protocol=4))
    images, labels = content(resnet.dataset("evaluation", str(tmp_path)))
    assert labels == [3, 9]
    assert np.array_equal(images.numpy().reshape(2, 3072), data)


class Malicious:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


def test_a_malicious_pickle_is_refused_and_not_run(resnet, tmp_path):
    folder, victim = tmp_path / FOLDERS["python"], tmp_path / "victim"
    folder.mkdir()
    evil = pickle.dumps({b"data": Malicious(victim), b"labels": []})
    pickle.loads(evil)
    assert victim.exists(), "the pickle has to be harmful for the test to mean anything"
    victim.unlink()
    (folder / "test_batch").write_bytes(evil)
    with pytest.raises(ValueError, match=r"test_batch: .*no CIFAR-10 file needs"):
        resnet.dataset("evaluation", str(folder))
    assert not victim.exists()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_an_archive_cut_short_is_refused(resnet, packed, keep):
    whole = packed.read_bytes()
    packed.write_bytes(whole[: int(len(whole) * keep)])
    refused(resnet, packed, str(packed))


@pytest.mark.parametrize("keep", [0.0, 0.51, 0.999])
def test_a_batch_cut_short_is_refused(resnet, packed, keep):
    batch = next(unpack(packed).glob("*/test_batch*"))
    whole = batch.read_bytes()
    batch.write_bytes(whole[: int(len(whole) * keep)])
    refused(resnet, batch.parent, str(batch))


def test_a_missing_batch_is_named(resnet, packed):
    batch = next(unpack(packed).glob("*/test_batch*"))
    batch.unlink()
    refused(resnet, batch.parent, "test_batch")


def test_other_files_and_paths_are_refused(resnet, tmp_path):
    (tmp_path / "notes.txt").write_text("no archive")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt"):
        refused(resnet, path, str(path))
    with pytest.raises(ValueError, match="--validation_data is missing"):
        resnet.dataset("evaluation", "")
    with pytest.raises(ValueError, match="mode 'test'"):
        resnet.dataset("test", str(tmp_path))


def refused(resnet, path: Path, named: str) -> None:
    with pytest.raises(ValueError, match=r"expected|cut short") as refusal:
        resnet.dataset("evaluation", str(path))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 1]}, "b'labels'"),
        ({b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]}, "uint8"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, "1 labels"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]}, "expected 0 to 9"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [b"cat"]}, "whole numbers"),
        ([1, 2], "a dict"),
    ],
)
def test_a_pickle_of_something_else_is_refused(resnet, tmp_path, batch, message):
    (tmp_path / "data_batch_1").touch()
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(ValueError, match=message):
        resnet.dataset("evaluation", str(tmp_path))


def test_training_images_are_crops_and_flips_drawn_from_torch(resnet, packed):
    training, evaluation = (resnet.dataset(mode, str(packed)) for mode in ("training", "evaluation"))
    torch.manual_seed(5)
    first = [training[0][0] for _ in range(8)]
    torch.manual_seed(5)
    again = [training[0][0] for _ in range(8)]
    assert all(map(torch.equal, first, again))
    assert any(not torch.equal(first[0], other) for other in first[1:])
    assert torch.equal(evaluation[0][0], evaluation[0][0])
    margin = torch.nn.functional.pad(training.images[0], (4,) * 4)
    windows = [margin[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    allowed = {bytes(view.contiguous().numpy()) for window in windows for view in (window, window.flip(2))}
    raw = [(image * resnet.DEVIATION + resnet.MEAN).round().to(torch.uint8) for image in first]
    assert {bytes(image.numpy()) for image in raw} <= allowed


def test_samples_collate(resnet, packed):
    images, labels = next(iter(DataLoader(resnet.dataset("training", str(packed)), batch_size=4)))
    assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.float32)
    assert labels.dtype == torch.int64


def test_resnet20_is_the_one_of_the_paper(resnet):
    model = resnet.custom_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    assert sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in model.modules()) == 20
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet20_learns_the_generated_set(resnet, zoo, tmp_path):
    archive = zoo("cifar10.generate").generate(tmp_path, samples=96)
    torch.manual_seed(0)
    model, batches = resnet.custom_model(), DataLoader(resnet.dataset("training", str(archive)), batch_size=32)
    optimizer, losses = resnet.optimizer(model.parameters()), []
    for images, labels in (batch for _ in range(5) for batch in batches):
        optimizer.zero_grad()
        step_loss = resnet.loss(labels, model(images))
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_the_published_schedule(resnet):
    epochs = {0: 1e-3, 35: 1e-3, 36: 5e-4, 41: 2e-4, 60: 2e-4, 61: 1e-4, 80: 1e-4, 81: 1e-5}
    assert {epoch: resnet.learning_rate(epoch) for epoch in epochs} == pytest.approx(epochs)


def test_the_callback_multiplies_by_the_number_of_workers(resnet, monkeypatch):
    horovod = SimpleNamespace(torch=SimpleNamespace(size=lambda: 3))
    monkeypatch.setitem(sys.modules, "horovod", horovod)
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod.torch)
    monkeypatch.setitem(
        sys.modules, "elasticdl.callbacks", SimpleNamespace(LearningRateScheduler=lambda schedule: schedule)
    )
    (schedule,) = resnet.callbacks()
    assert schedule(36) == pytest.approx(3 * 5e-4)


def test_the_generator_is_a_command_and_repeats_itself(tmp_path):
    def run(out, *more):
        command = [sys.executable, ZOO / "cifar10" / "generate.py", "--out", out, "--samples", "50", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    done = run(tmp_path / "a")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "a" / "cifar-10-python.tar.gz"))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["cifar-10-python.tar.gz"]
    run(tmp_path / "b")
    run(tmp_path / "c", "--seed", "1")
    first, same, other = ((tmp_path / name / "cifar-10-python.tar.gz").read_bytes() for name in "abc")
    assert first == same
    assert first != other
    refusal = run(tmp_path / "d", "--samples", "4")
    assert refusal.returncode == 2
    assert "at least 5" in refusal.stderr


def test_a_failed_generation_leaves_nothing_and_keeps_the_old_file(zoo, tmp_path, monkeypatch):
    generate = zoo("cifar10.generate").generate
    before = generate(tmp_path, samples=50).read_bytes()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        generate(tmp_path, samples=60)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-python.tar.gz"]
    assert (tmp_path / "cifar-10-python.tar.gz").read_bytes() == before
