"""Hugging Face's Trainer under `elasticdl run`: alone by transformers itself and elastically it makes the same steps."""

import json
import signal
from pathlib import Path

import pytest
from running_job import start

pytest.importorskip("transformers")

SCRIPT = str(Path(__file__).parent / "scripts" / "transformers_example.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WARM, WARM_ENV = ["torch", "torch._dynamo", "elasticdl.elastic.transformers"], OFFLINE


def train_alone(alone, name, folder, *options):
    alone.run_well(SCRIPT, name, folder, "plain", *options)
    return read_end(folder)


def read_end(folder):
    return json.loads((folder / "end.json").read_text())


def require_same(ours, theirs, *, since=0):
    """All that was logged from this step on, and where training has ended."""
    numbers = [(end["step"], end["epoch"], end["best_metric"] or 0.0) for end in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert ours["flos"] == pytest.approx(theirs["flos"], rel=0.25)  # which depend on how texts are padded
    assert (ours["best_checkpoint"], ours["checkpoints"]) == (theirs["best_checkpoint"], theirs["checkpoints"])
    assert without_times(ours["metrics"]) == pytest.approx(without_times(theirs["metrics"]), rel=1e-4)
    mine, expected = ([without_times(row) for row in end["history"] if row["step"] > since] for end in (ours, theirs))
    if since:  # of the mean over the training, that is of the part since then
        assert mine.pop(-2)["train_loss"] < expected.pop(-2)["train_loss"]
    assert [row["step"] for row in mine] == [row["step"] for row in expected]
    for row, other in zip(mine, expected, strict=True):
        assert row.keys() == other.keys()
        assert row == pytest.approx(other, rel=1e-5 if "loss" in row else 1e-4, abs=1e-6), f"step {row['step']}"


def without_times(row):
    return {key: value for key, value in row.items() if not key.endswith(("_runtime", "_second", "total_flos"))}


class Disturbed:
    """A job of which workers join and leave."""

    def __init__(self, job, folder):
        self.job, self.curve = job, folder / "curve"

    def steps(self):
        return len(self.curve.read_text().splitlines()) if self.curve.exists() else 0

    def wait_for_steps(self, number=3):
        made = self.steps()
        self.job.wait_for(f"{number} steps", lambda: self.steps() >= made + number)

    def scale(self, workers):
        after = max(world["world"] for world in self.job.entries("world_formed"))
        self.job.scale(workers)
        world = self.job.wait_for_world(size=workers, after=after)
        self.wait_for_steps()
        return world

    def lose(self, world, rank, number):
        self.job.signal(world["members"][rank], number)
        changed = self.job.wait_for_world_without(world["members"][rank])
        self.wait_for_steps()
        return changed


@pytest.mark.parametrize(
    ("name", "epochs", "engine"),
    [("classify", 6, "horovod"), pytest.param("language_model", 5, "torch", marks=pytest.mark.slow)],
)
def test_workers_join_leave_and_are_killed(alone, tmp_path, name, epochs, engine):
    theirs = train_alone(alone, name, tmp_path / "alone", f"num_train_epochs={epochs}")
    folder, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    # A progress bar goes over to another worker with everything else that is rank 0's.
    script = ["python", SCRIPT, name, str(folder), "elastic", f"num_train_epochs={epochs}", "disable_tqdm=false"]
    extra = {**OFFLINE, "TEST_SLOW_WHILE": str(slow)}
    with start(tmp_path, "run", "--num_workers", "2", "--collective", engine, "--", *script, **extra) as job:
        disturbed = Disturbed(job, folder)
        disturbed.wait_for_steps()
        world = disturbed.scale(4)
        world = disturbed.lose(world, 2, signal.SIGKILL)
        disturbed.lose(world, 0, signal.SIGTERM)
        world = disturbed.scale(3)
        disturbed.lose(world, 0, signal.SIGKILL)
        disturbed.scale(1)
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
        assert not job.entries("warning"), job.entries("warning")
    require_same(read_end(folder), theirs)


def train_together(home, workers, *arguments, **env):
    script = ["python", SCRIPT, *arguments]
    options = ["--num_workers", str(workers), "--collective", "torch"]
    with start(home, "run", *options, "--", *script, **OFFLINE, **env) as job:
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), "states and random streams are those of one device on all workers"
    return read_end(Path(arguments[1]))


def test_it_resumes_from_transformers_checkpoint_with_more_workers(alone, tmp_path):
    options = ["num_train_epochs=2", "save_steps=15", "eval_steps=10"]
    theirs = train_alone(alone, "language_model", tmp_path / "alone", *options)
    resume = f'resume="{tmp_path}/alone/out/checkpoint-15"'  # in the middle of an epoch
    ours = train_together(tmp_path, 3, "language_model", str(tmp_path / "elastic"), "elastic", *options, resume)
    assert ours["checkpoints"] == ["checkpoint-30", "checkpoint-45", "checkpoint-50"]
    require_same({**ours, "checkpoints": theirs["checkpoints"]}, theirs, since=15)


@pytest.mark.parametrize("step", [pytest.param(50, marks=pytest.mark.slow), 75])  # 75 is the last
def test_a_checkpoint_that_its_writer_was_lost_over_is_written(alone, tmp_path, step):
    theirs = train_alone(alone, "classify", tmp_path / "alone", "num_train_epochs=3")
    (tmp_path / "dies").write_text(str(step))
    folder = tmp_path / "elastic"
    arguments = ["classify", str(folder), "elastic", "num_train_epochs=3"]
    ours = train_together(tmp_path, "1-2", *arguments, TEST_DIES_AT=str(tmp_path / "dies"))
    require_same(ours, theirs)
    assert not (tmp_path / "dies").exists()
    assert (folder / "out" / f"checkpoint-{step}" / "trainer_state.json").exists()
    written = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    assert written["global_step"] == step


REFUSED = ["classify", "{folder}", "elastic", "auto_find_batch_size=true"]
WORDS = "elastic.transformers: auto_find_batch_size changes the batch size: give per_device_train_batch_size"


def test_what_cant_be_had_is_one_line(alone, tmp_path):
    ended = alone.run(SCRIPT, *(each.format(folder=tmp_path / "out") for each in REFUSED))
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(WORDS)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow  # of a plain loop's script in test_plain_loop.py
def test_it_is_what_a_job_ends_with(tmp_path):
    arguments = [each.format(folder=tmp_path / "out") for each in REFUSED]
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", SCRIPT, *arguments, **OFFLINE) as job:
        assert job.finish() == 1
    assert WORDS in job.output
