"""The main job with real processes and real Horovod: the model does not depend on what happens to the workers."""

import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from running_job import ZOO, RunningJob, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.sample_records import consumed
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.job.spec import JobSpec
from elasticdl.worker.learner import build_model
from elasticdl.worker.zoo import load_module

STEPS = 120  # that are compared with PyTorch's own
SAMPLES, BATCH = 1500, 250
EPOCHS = 100
TRAIN = (
    *("train", "--model_zoo", str(ZOO), "--model_def", "slow_mlp", "--global_batch_size", str(BATCH)),
    *("--max_worker_batch_size", "50"),
)


def losses(folder: Path) -> dict[int, float]:
    scalars = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    scalars.Reload()
    return {event.step: event.value for event in scalars.Scalars("loss")}


@pytest.fixture(scope="module")
def plain_curve():
    """Losses of every step as PyTorch alone makes them: whole batches, and none of this project but their order."""
    spec = JobSpec(model_zoo=str(ZOO), model_def="slow_mlp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", list(sys.path))
        module = load_module(spec)
    model = build_model(module, spec.seed)
    optimizer = module.optimizer(model.parameters())
    data = module.dataset("training", "")
    curve = {}
    for epoch in range(-(-STEPS * BATCH // SAMPLES)):
        order = epoch_order(SAMPLES, spec.seed, epoch)
        for first in range(0, SAMPLES, BATCH):
            inputs, labels = data[order[first : first + BATCH]]
            optimizer.zero_grad()
            loss = module.loss(labels, model(inputs))
            loss.backward()
            optimizer.step()
            curve[len(curve) + 1] = loss.item()
    return curve


def assert_same_curve(ours: dict[int, float], other: dict[int, float]) -> None:
    for step in range(1, STEPS + 1):
        assert ours[step] == pytest.approx(other[step], rel=1e-5, abs=1e-7), f"step {step}"


def assert_each_sample_once(files: list[Path], epochs: int) -> None:
    counted = consumed(files)
    assert sorted(counted) == list(range(epochs))
    for epoch, counts in counted.items():
        assert counts == Counter(range(SAMPLES)), f"epoch {epoch}: a sample was lost or repeated"


def disturb(job: RunningJob, start_with: int, most: int, steps: int) -> None:
    """Grow, SIGKILL of rank 0, SIGTERM of another, and 2 in the end, each at a random step; who goes is replaced."""
    rng = random.Random(5)

    def some_steps_later() -> None:
        job.wait_for_step(job.steps_recorded() + rng.randint(1, steps))

    job.wait_for_world(size=start_with)
    some_steps_later()
    job.scale(start_with, most)
    world = job.wait_for_world(size=most)
    some_steps_later()
    killed = world["members"][0]
    job.signal(killed, signal.SIGKILL)
    world = job.wait_for_world_without(killed)
    world = job.wait_for_world(size=most, after=world["world"] - 1)
    some_steps_later()
    told = rng.choice(world["members"])
    job.signal(told, signal.SIGTERM)
    world = job.wait_for_world_without(told)
    world = job.wait_for_world(size=most, after=world["world"] - 1)  # else there may be two already
    some_steps_later()
    job.scale(2)
    job.wait_for_world(size=2, after=world["world"])
    some_steps_later()


def test_workers_that_come_and_go_do_not_show_in_the_losses(plain_curve, tmp_path):
    board, slow = tmp_path / "board", tmp_path / "slow"
    slow.touch()
    arguments = [*TRAIN, "--num_workers", "2", "--num_epochs", str(EPOCHS), "--output", str(tmp_path / "out")]
    pace = {"TEST_MICRO_BATCH_SECONDS": "0.03", "TEST_SLOW_WHILE": str(slow)}
    with start(tmp_path, *arguments, "--tensorboard_log_dir", str(board), **pace) as job:
        disturb(job, 2, 4, 8)
        slow.unlink()  # all has happened: the rest may be as fast as it can
        assert job.finish() == 0, job.describe()
        assert "without the fork server" not in job.job.master_log.read_text()  # all were forked
        pauses, files = job.entries("pause"), job.record_files()
    ours = losses(board)
    assert sorted(ours) == list(range(1, max(ours) + 1)), "a step is missing"
    assert_same_curve(ours, plain_curve)
    assert_each_sample_once(files, EPOCHS)
    assert {pause["kind"] for pause in pauses} == {"grow", "shrink", "failure"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("succeeded", max(ours))
    assert len(summary["worlds"]) >= 5
    assert summary["metrics"]["accuracy"] > 0.9


def test_two_killed_at_once_one_more_while_the_world_forms_and_one_that_freezes(tmp_path):
    arguments = [*TRAIN, "--num_workers", "1-5", "--num_epochs", "1000000", "--heartbeat_timeout", "3"]
    with start(tmp_path, *arguments, TEST_MICRO_BATCH_SECONDS="0.02") as job:
        world = job.wait_for_world(size=5)
        job.wait_for_step(job.steps_recorded() + 2)
        first, second, third, *survivors = world["members"]  # rank 0 among them
        job.signal(first, signal.SIGKILL)
        job.signal(second, signal.SIGKILL)
        job.wait_for("broken world", lambda: job.entries("world_broken"))
        job.signal(third, signal.SIGKILL)
        job.wait_for("the survivors' pause", lambda: {p["worker"] for p in job.entries("pause")} >= set(survivors))
        job.wait_for_step(job.steps_recorded() + 5)
        worst = max(pause["total"] for pause in job.entries("pause") if pause["worker"] in survivors)
        assert worst < 15, "somebody waited out a timeout of Gloo"
        frozen = job.wait_for_world(size=5, after=world["world"])["members"][0]
        job.signal(frozen, signal.SIGSTOP)
        after = job.wait_for_world_without(frozen)
        job.wait_for("steps", lambda: any(pause["world"] >= after["world"] for pause in job.entries("pause")))
        job.stop()
        assert job.finish() == 1, job.describe()
        left = {entry["worker"]: entry["cause"] for entry in job.entries("worker_left")}
        assert [left[worker] for worker in (first, second, third, frozen)] == ["killed", "killed", "killed", "frozen"]


def test_an_error_of_the_user_stops_the_job_once_with_its_traceback_first(tmp_path):
    arguments = [*TRAIN, "--num_workers", "3", "--num_epochs", "1000"]
    with start(tmp_path, *arguments, TEST_FAIL_AT_MICRO_BATCH="50") as job:
        assert job.finish() == 1
        assert job.output.count("Traceback (most recent call last)") == 1
        assert 'raise KeyError("a mistake in the user\'s loss")' in job.output
        assert "slow_mlp.py" in job.output
        assert len(job.entries("worker_launched")) == 3


def test_interrupting_leaves_a_checkpoint_from_which_another_number_of_workers_goes_on(plain_curve, tmp_path):
    board = tmp_path / "board"
    arguments = [*TRAIN, "--num_epochs", "1000", "--max_step", str(STEPS), "--checkpoint_dir", str(tmp_path / "kept")]
    arguments += ["--checkpoint_steps", "10000", "--tensorboard_log_dir", str(board)]
    with start(tmp_path, *arguments, "--num_workers", "3", name="first", TEST_MICRO_BATCH_SECONDS="0.02") as job:
        job.wait_for_world(size=3)
        job.wait_for_step(25)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.describe()
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".pt"]
    with start(tmp_path, *arguments, "--num_workers", "2", name="second") as job:
        assert job.finish() == 0, job.describe()
        (resumed, *_) = job.entries("resumed")
    assert resumed["step"] >= 25
    assert_same_curve(losses(board), plain_curve)
    for epoch, counts in consumed(sorted((tmp_path / "record").glob("*.jsonl"))).items():
        assert set(counts.values()) == {1}, f"epoch {epoch}"
