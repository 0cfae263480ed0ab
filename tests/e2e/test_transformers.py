"""Hugging Face's Trainer under `elasticdl run`: alone by transformers itself and elastically it makes the same steps."""

import json
import signal
from pathlib import Path

import pytest
from running_job import read_curve, run_alone, start

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "transformers_example.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def train_alone(name, folder, *options):
    run_alone(SCRIPT, name, folder, "plain", *options, **OFFLINE)
    return read_end(folder)


def read_end(folder):
    return json.loads((folder / "end.json").read_text())


def require_same(ours, theirs):
    """All that was logged, and where training has ended."""
    numbers = [(end["step"], end["epoch"], end["best_metric"] or 0.0) for end in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert (ours["best_checkpoint"], ours["checkpoints"]) == (theirs["best_checkpoint"], theirs["checkpoints"])
    assert without_times(ours["metrics"]) == pytest.approx(without_times(theirs["metrics"]), rel=1e-4)
    for mine, expected in zip(ours["history"], theirs["history"], strict=True):
        row, other = without_times(mine), without_times(expected)
        assert row.keys() == other.keys()
        assert row == pytest.approx(other, rel=1e-5 if "loss" in row else 1e-4, abs=1e-6), f"step {row['step']}"


def without_times(row):
    return {key: value for key, value in row.items() if not key.endswith(("_runtime", "_second", "total_flos"))}


@pytest.mark.parametrize(
    ("name", "epochs", "engine"),
    [("classify", 6, "horovod"), pytest.param("language_model", 5, "torch", marks=pytest.mark.slow)],
)
def test_workers_join_leave_and_are_killed(tmp_path, name, epochs, engine):
    theirs = train_alone(name, tmp_path / "alone", f"num_train_epochs={epochs}")
    folder, slow = tmp_path / "elastic", tmp_path / "slow"
    curve = folder / "curve"
    slow.touch()
    # A progress bar goes over to another worker with everything else that is rank 0's.
    script = ["python", str(SCRIPT), name, str(folder), "elastic", f"num_train_epochs={epochs}", "disable_tqdm=false"]
    extra = {**OFFLINE, "TEST_SLOW_WHILE": str(slow)}
    with start(tmp_path, "run", "--num_workers", "2", "--collective", engine, "--", *script, **extra) as job:

        def scale(workers):
            after = max(world["world"] for world in job.entries("world_formed"))
            job.scale(workers)
            world = job.wait_for_world(size=workers, after=after)
            job.wait_for_rows(curve)
            return world

        def lose(world, rank, number):
            job.signal(world["members"][rank], number)
            changed = job.wait_for_world_without(world["members"][rank])
            job.wait_for_rows(curve)
            return changed

        job.wait_for_rows(curve)
        world = scale(3)
        world = lose(world, 2, signal.SIGKILL)
        lose(world, 0, signal.SIGTERM)
        lose(scale(2), 0, signal.SIGKILL)
        scale(1)
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
        assert not job.entries("warning"), job.entries("warning")
    assert read_curve(curve)
    require_same(read_end(folder), theirs)


def test_the_last_checkpoint_is_written_though_its_writer_was_lost_over_it(tmp_path):
    theirs = train_alone("classify", tmp_path / "alone", "num_train_epochs=3")
    dies, folder = tmp_path / "dies", tmp_path / "elastic"
    dies.write_text("75")
    script = ["python", str(SCRIPT), "classify", str(folder), "elastic", "num_train_epochs=3"]
    options = ["--num_workers", "1-2", "--collective", "torch", "--", *script]
    with start(tmp_path, "run", *options, **OFFLINE, TEST_DIES_AT=str(dies)) as job:
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), "states and random streams are those of one device on all workers"
    require_same(read_end(folder), theirs)
    assert not dies.exists()
    written = json.loads((folder / "out" / "checkpoint-75" / "trainer_state.json").read_text())
    assert written["global_step"] == 75
