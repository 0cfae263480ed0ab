"""Keras under the same disturbances as PyTorch, with real processes and real Horovod: the losses show none of them."""

import csv
import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from running_job import ZOO, run_cli, start
from test_training import losses

from elasticdl.elastic.record import consumed

STEPS = 100
TRAIN = (
    *("train", "--model_zoo", str(ZOO), "--model_def", "slow_keras", "--global_batch_size", "250"),
    *("--max_worker_batch_size", "50", "--num_epochs", "1000"),
)


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """Losses of every step on a single worker."""
    home = tmp_path_factory.mktemp("fixed")
    with start(home, *TRAIN, "--max_step", str(STEPS), "--tensorboard_log_dir", str(home / "board")) as job:
        assert job.finish() == 0, job.describe()
    return losses(home / "board")


def assert_same_curve(ours: dict[int, float], other: dict[int, float]) -> None:
    for step in range(1, STEPS + 1):
        assert ours[step] == pytest.approx(other[step], rel=1e-5, abs=1e-7), f"step {step}"


def assert_each_sample_once(files: list[Path], epochs: range) -> None:
    counted = consumed(files)
    for epoch in epochs:
        assert counted[epoch] == Counter(range(1500)), f"epoch {epoch}: a sample was lost or repeated"


def test_three_workers_give_the_losses_of_one_and_resume_on_two(curve, tmp_path):
    board, kept = tmp_path / "board", tmp_path / "kept"
    arguments = [*TRAIN, "--checkpoint_dir", str(kept), "--checkpoint_steps", "10000", "--max_step", str(STEPS)]
    arguments += ["--tensorboard_log_dir", str(board)]
    with start(tmp_path, *arguments, "--num_workers", "3", name="first", TEST_MICRO_BATCH_SECONDS="0.05") as job:
        job.wait_for_world(size=3)
        job.wait_for_step(40)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.describe()
    assert [path.suffix for path in kept.iterdir()] == [".npz"]
    with start(tmp_path, *arguments, "--num_workers", "2", name="second") as job:
        assert job.finish() == 0, job.describe()
        resumed = job.entries("resumed")
    assert resumed[0]["step"] >= 40
    assert_same_curve(losses(board), curve)


def test_workers_that_come_and_go_do_not_show(curve, tmp_path):
    board, out, written = (tmp_path / name for name in ("board", "out", "written"))
    slow = tmp_path / "slow"
    slow.touch()
    written.mkdir()
    arguments = [*TRAIN, "--num_workers", "2", "--output", str(out), "--tensorboard_log_dir", str(board)]
    pace = {"TEST_MICRO_BATCH_SECONDS": "0.25", "TEST_SLOW_WHILE": str(slow), "TEST_CALLBACK_FOLDER": str(written)}
    with start(tmp_path, *arguments, "--max_step", "900", **pace) as job:
        job.wait_for_world(size=2)
        job.wait_for_step(8)
        assert run_cli(tmp_path, "scale", "job", "2-3").returncode == 0
        world = job.wait_for_world(size=3)
        job.wait_for_step(job.steps_recorded() + 5)
        job.signal(world["members"][0], signal.SIGKILL)
        world = job.wait_for_world(size=2, after=world["world"])
        world = job.wait_for_world(size=3, after=world["world"])  # with its replacement
        job.wait_for_step(job.steps_recorded() + 5)
        assert run_cli(tmp_path, "scale", "job", "2").returncode == 0
        job.wait_for_world(size=2, after=world["world"])
        job.wait_for_step(job.steps_recorded() + 3)
        slow.unlink()  # all has happened: the rest may be as fast as it can
        assert job.finish() == 0, job.describe()
        pauses, files = job.entries("pause"), job.record_files()
    assert_same_curve(losses(board), curve)
    assert_each_sample_once(files, range(900 // 6))
    assert {pause["kind"] for pause in pauses} == {"grow", "shrink", "failure"}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("succeeded", 900)
    assert summary["metrics"]["accuracy"] > 0.9
    assert {path.name for path in out.iterdir()} == {"summary.json", "model.keras", "saved_model"}
    rows = list(csv.DictReader((written / "epochs.csv").open()))
    # The one who was killed may have been about to write a row; whoever followed it goes on in the same file.
    assert [int(row["epoch"]) for row in rows] == list(range(900 // 6))
