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


def test_both_formats_packed_or_not_give_the_same_samples(resnet, zoo, tmp_path):
    seen = []
    for fmt, folder in FOLDERS.items():
        archive = zoo("cifar10.generate").generate(tmp_path / fmt, fmt, SAMPLES, seed=3)
        for place in (archive, archive.parent, unpack(archive) / folder):
            where = str(place if place.exists() else place.parent)
            seen.append([resnet.dataset(mode, where) for mode in ("training", "evaluation")])
    training, evaluation = seen[0]
    assert training.images.shape == (SAMPLES, 3, 32, 32)
    assert (len(training.labels), len(evaluation.images)) == (SAMPLES, SAMPLES // 5)
    for other in seen[1:]:
        for ours, theirs in zip(seen[0], other, strict=True):
            assert torch.equal(ours.images, theirs.images)
            assert ours.labels == theirs.labels


def test_the_python_version_is_what_python_2_wrote(zoo, tmp_path):
    folder = unpack(zoo("cifar10.generate").generate(tmp_path, "python", SAMPLES)) / FOLDERS["python"]
    names = {path.name for path in folder.iterdir()}
    assert names == {*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"}
    batch = pickle.loads((folder / "data_batch_2").read_bytes(), encoding="bytes")
    assert set(batch) == {b"batch_label", b"labels", b"data", b"filenames"}
    assert batch[b"batch_label"] == b"training batch 2 of 5"
    data, labels = batch[b"data"], batch[b"labels"]
    assert (data.dtype, data.shape, data.flags.c_contiguous) == (np.uint8, (21, 3072), True)
    assert (type(labels), len(labels)) == (list, 21)
    meta = pickle.loads((folder / "batches.meta").read_bytes(), encoding="latin1")
    assert (meta["label_names"][0], meta["num_vis"]) == ("airplane", 3072)


def write_batch(folder, batch):
    (folder / "data_batch_1").touch()
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))


def test_a_batch_written_by_todays_python_is_read(resnet, tmp_path):
    data = np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072).astype(np.uint8)
    write_batch(tmp_path, {b"data": data, b"labels": [3, 9]})
    found = resnet.dataset("evaluation", str(tmp_path))
    assert found.labels == [3, 9]
    assert np.array_equal(found.images.numpy().reshape(2, 3072), data)


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


@pytest.mark.parametrize("keep", [0.0, 0.51, 0.999])
def test_an_archive_or_a_batch_cut_short_or_missing_is_refused(resnet, packed, keep):
    whole = packed.read_bytes()
    packed.write_bytes(whole[: int(len(whole) * keep * 0.99)])
    refuse(resnet, packed, str(packed))
    packed.write_bytes(whole)
    batch = next(unpack(packed).glob("*/test_batch*"))
    whole = batch.read_bytes()
    batch.write_bytes(whole[: int(len(whole) * keep)])
    refuse(resnet, batch.parent, str(batch))
    batch.unlink()
    refuse(resnet, batch.parent, "test_batch")


def refuse(resnet, path: Path, named: str) -> None:
    assert named in refused(r"expected|cut short", lambda: resnet.dataset("evaluation", str(path)), ValueError)


def test_other_files_and_paths_are_refused(resnet, tmp_path):
    (tmp_path / "notes.txt").write_text("no archive")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt"):
        refuse(resnet, path, str(path))
    for mode, where, words in (("evaluation", "", "--validation_data is missing"), ("test", "x", "mode 'test'")):
        with pytest.raises(ValueError, match=words):
            resnet.dataset(mode, where)


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
    with pytest.raises(ValueError, match=message):
        resnet.dataset("evaluation", str(tmp_path))


def test_training_images_are_crops_and_flips_drawn_from_torch(resnet, packed):
    training, evaluation = (resnet.dataset(mode, str(packed)) for mode in ("training", "evaluation"))

    def drawn():
        torch.manual_seed(5)
        return torch.stack([training[0][0] for _ in range(8)])

    first = drawn()
    assert torch.equal(first, drawn())
    assert not torch.equal(first, first[:1].expand_as(first))
    assert torch.equal(evaluation[0][0], evaluation[0][0])
    margin = torch.nn.functional.pad(training.images[0], (4,) * 4)
    windows = [margin[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    allowed = {bytes(view.contiguous().numpy()) for window in windows for view in (window, window.flip(2))}
    raw = (first * resnet.DEVIATION + resnet.MEAN).round().to(torch.uint8)
    assert {bytes(image.numpy()) for image in raw} <= allowed


def test_resnet20_is_the_one_of_the_paper(resnet):
    model = resnet.custom_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    assert sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in model.modules()) == 20
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_callback_multiplies_the_published_schedule_by_the_number_of_workers(resnet, monkeypatch):
    epochs = {0: 1e-3, 35: 1e-3, 36: 5e-4, 41: 2e-4, 60: 2e-4, 61: 1e-4, 80: 1e-4, 81: 1e-5}
    horovod = SimpleNamespace(torch=SimpleNamespace(size=lambda: 3))
    callbacks = SimpleNamespace(LearningRateScheduler=lambda schedule: schedule)
    for name, module in {"horovod": horovod, "horovod.torch": horovod.torch, "elasticdl.callbacks": callbacks}.items():
        monkeypatch.setitem(sys.modules, name, module)
    (schedule,) = resnet.callbacks()
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
