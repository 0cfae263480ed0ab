"""Scripts with Run:AI's API under a real master, while workers are killed and join: nothing of it shows."""

import json
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from running_job import QUICK_KERAS, start
from test_training import losses

from benchmarks.sample_records import consumed

SCRIPTS = Path(__file__).parent / "scripts"
PASSES, STEPS = 40, 200  # of the second call of fit
EPOCHS_IN_PASS = 3
EPOCHS_BEFORE, STEPS_BEFORE = 3, 15  # of the first
SAMPLES = 300


def lines(log, word):
    return [json.loads(line) for line in re.findall(rf"^{word} (.*)$", log, re.M)]


def run(home, workers, *script, **env):
    options = ["--num_workers", workers, "--tensorboard_log_dir", str(home / "board")]
    options += ["--sample_record", str(home / "record")]
    return start(home, "run", *options, "--", sys.executable, *script, **QUICK_KERAS, **env)


def disturb(job, *, after=0):
    """Kill rank 0 a few steps after that one, and wait until its replacement trains along."""
    world = job.wait_for_world(size=2)
    job.wait_for_step(after + 2)
    world = job.wait_for_world(size=2, after=max(w["world"] for w in job.entries("world_formed")) - 1)
    job.signal(world["members"][0], signal.SIGKILL)
    left = job.wait_for_world(size=1, after=world["world"])
    job.wait_for_step(job.steps_recorded() + 2)
    both = job.wait_for_world(size=2, after=left["world"])
    job.wait_for_step(job.steps_recorded() + 2)
    return both["members"]


def finish(job, workers):
    """Wait for the end of the job, which all of so many workers have to reach."""
    assert job.finish() == 0, job.describe()
    causes = [entry["cause"] for entry in job.entries("worker_left")]
    assert causes.count("finished") == workers, job.describe()
    return {worker["worker"]: log(job, worker["worker"]) for worker in job.entries("worker_started")}


def log(job, worker):
    return job.job.worker_log(worker).read_text()


def assert_same_curve(home, other, steps):
    ours, theirs = losses(home / "board"), losses(other / "board")
    assert sorted(ours) == sorted(theirs) == list(range(1, steps + 1))
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, rel=1e-5, abs=1e-6), f"step {step}"


def test_fit_and_fit_again_show_no_trace_of_a_kill_and_a_newcomer(tmp_path):
    """The newcomer comes while the others are in the second ``fit``, and has to catch up with them."""
    script, one, two = str(SCRIPTS / "runai_keras.py"), tmp_path / "one", tmp_path / "two"
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TEST_PASSES": str(PASSES)}
    folders = [home / "checkpoints" for home in (two, one)]
    for folder in folders:
        folder.mkdir(parents=True)
    ours, theirs = ({**env, "TEST_CHECKPOINTS": str(folder)} for folder in folders)
    with run(two, "1-2", script, TEST_SLOW_WHILE=str(slow), **ours) as job, run(one, "1", script, **theirs) as alone:
        left = disturb(job, after=STEPS_BEFORE)
        slow.unlink()
        logs = finish(job, 2)
        wanted = finish(alone, 1)[0]
        files = job.record_files()
    assert_same_curve(two, one, STEPS_BEFORE + STEPS)
    used = consumed(files)
    for epoch in range(EPOCHS_BEFORE):
        used[epoch] -= Counter(range(SAMPLES))
    passes = [
        sum((used[first + part] for part in range(EPOCHS_IN_PASS)), Counter()) for first in range(0, len(used), 3)
    ]
    assert passes == [Counter(range(SAMPLES))] * PASSES
    written, wanted_files = ([path.name for path in sorted(folder.iterdir())] for folder in folders)
    assert written == wanted_files != []
    told = {tuple(step["step"]): step for step in lines(wanted, "step")}
    assert len(told) == STEPS_BEFORE + STEPS
    for step in (step for text in logs.values() for step in lines(text, "step")):
        expected = told[tuple(step["step"])]
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6), step
        assert step["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6), step
    survivor, newcomer = (logs[worker] for worker in left)
    for title in ("history", "between", "evaluated"):
        assert lines(newcomer, title) == lines(survivor, title), f"a newcomer's {title} is the job's"
    for title in ("between", "evaluated"):
        assert lines(newcomer, title)[0] == pytest.approx(lines(wanted, title)[0], rel=1e-4), title
    for ours, theirs in zip(lines(survivor, "history"), lines(wanted, "history"), strict=True):
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert [lines(text, "master") for text in (survivor, newcomer)] == [[True], [False]]


def test_micro_batches_of_torch_show_no_trace_of_a_kill_and_a_newcomer(tmp_path):
    import torch

    script, one, two = str(SCRIPTS / "runai_torch.py"), tmp_path / "one", tmp_path / "two"
    slow = tmp_path / "slow"
    slow.touch()
    arguments = {home: (script, str(PASSES), str(home / "weights")) for home in (one, two)}
    with (
        run(two, "1-2", *arguments[two], TEST_SLOW_WHILE=str(slow)) as job,
        run(one, "1", *arguments[one]) as alone,
    ):
        disturb(job)
        slow.unlink()
        finish(job, 2)
        finish(alone, 1)
        files = job.record_files()
    assert_same_curve(two, one, STEPS)
    assert consumed(files) == {epoch: Counter(range(SAMPLES)) for epoch in range(PASSES)}
    (wanted,) = (torch.load(path) for path in one.glob("weights.*"))
    first, second = (torch.load(path) for path in two.glob("weights.*"))
    for name, tensor in wanted.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


def test_an_example_of_run_ais_for_torch_is_told_what_to_write_before_its_first_step(tmp_path):
    """Else its workers would each train a model of its own."""
    script = [str(SCRIPTS / "runai_example_torch.py"), str(tmp_path / "curve"), "1", "bare"]
    with start(tmp_path, "run", "--num_workers", "2", "--", sys.executable, *script) as job:
        assert job.finish() == 1
    assert "optimizer.step() under `elasticdl run`, before the loop was prepared" in job.output
