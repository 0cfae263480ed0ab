"""A script with Run:AI's API under a real master, while workers are killed and join: nothing of it shows."""

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

SCRIPT = Path(__file__).parent / "scripts" / "runai_keras.py"
PASSES, STEPS = 40, 200  # of the second call of fit
EPOCHS_IN_PASS = 3
EPOCHS_BEFORE, STEPS_BEFORE = 3, 15  # of the first
SAMPLES = 300


def lines(log, word):
    return [json.loads(line) for line in re.findall(rf"^{word} (.*)$", log, re.M)]


def run(home, workers, **env):
    options = ["--num_workers", workers, "--tensorboard_log_dir", str(home / "board")]
    options += ["--sample_record", str(home / "record")]
    (home / "checkpoints").mkdir(parents=True)
    own = {"TEST_PASSES": str(PASSES), "TEST_CHECKPOINTS": str(home / "checkpoints"), **QUICK_KERAS, **env}
    return start(home, "run", *options, "--", sys.executable, str(SCRIPT), **own)


def disturb(job, slow):
    """Kill rank 0 in the second ``fit``, and wait until its replacement trains along; both that are left.

    The first ``fit`` is slow until both workers are there: who comes later evaluates a model of no training after it.
    """
    job.wait_for_world(size=2)
    assert job.steps_recorded() < STEPS_BEFORE, "the survivor has not trained in the first fit"
    slow.unlink()
    job.wait_for_step(STEPS_BEFORE + 2)
    world = job.wait_for_world(size=2, after=max(w["world"] for w in job.entries("world_formed")) - 1)
    job.signal(world["members"][0], signal.SIGKILL)
    left = job.wait_for_world(size=1, after=world["world"])
    job.wait_for_step(job.steps_recorded() + 2)
    both = job.wait_for_world(size=2, after=left["world"])
    job.wait_for_step(job.steps_recorded() + 2)
    return both["members"]


def finish(job, workers):
    """Wait for the end of the job, which all of so many workers have to reach; what each has printed."""
    assert job.finish() == 0, job.describe()
    causes = [entry["cause"] for entry in job.entries("worker_left")]
    assert causes.count("finished") == workers, job.describe()
    return {each["worker"]: job.job.worker_log(each["worker"]).read_text() for each in job.entries("worker_started")}


def test_fit_and_fit_again_show_no_trace_of_a_kill_and_a_newcomer(tmp_path):
    """The newcomer comes while the others are in the second ``fit``, and has to catch up with them."""
    one, two, first, second = (tmp_path / name for name in ("one", "two", "first", "second"))
    first.touch()
    second.touch()
    slow = {"TEST_FIRST_SLOW_WHILE": str(first), "TEST_SLOW_WHILE": str(second)}
    with run(two, "1-2", **slow) as job, run(one, "1") as alone:
        left = disturb(job, first)
        second.unlink()
        logs = finish(job, 2)
        wanted = finish(alone, 1)[0]
        files = job.record_files()
    ours, theirs = losses(two / "board"), losses(one / "board")
    assert sorted(ours) == sorted(theirs) == list(range(1, STEPS_BEFORE + STEPS + 1))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    used = consumed(files)
    for epoch in range(EPOCHS_BEFORE):
        used[epoch] -= Counter(range(SAMPLES))
    parts = [range(first, first + EPOCHS_IN_PASS) for first in range(0, len(used), EPOCHS_IN_PASS)]
    assert [sum((used[part] for part in each), Counter()) for each in parts] == [Counter(range(SAMPLES))] * PASSES
    written, wanted_files = (len(list((home / "checkpoints").iterdir())) for home in (two, one))
    assert written > 0
    assert abs(written - wanted_files) <= 1, "a new rank 0 counts steps from the end of the last epoch"
    told = {tuple(step["step"]): step for step in lines(wanted, "step")}
    assert len(told) == STEPS_BEFORE + STEPS
    for step in (step for text in logs.values() for step in lines(text, "step")):
        expected = told[tuple(step["step"])]
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6), step
        assert step["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6), step
    survivor, newcomer = (logs[worker] for worker in left)
    for title in ("history", "evaluated"):
        assert lines(newcomer, title) == lines(survivor, title), f"a newcomer's {title} is the job's"
    for title in ("between", "evaluated"):
        assert lines(survivor, title)[0] == pytest.approx(lines(wanted, title)[0], rel=1e-4), title
    for ours, theirs in zip(lines(survivor, "history"), lines(wanted, "history"), strict=True):
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert [lines(text, "master") for text in (survivor, newcomer)] == [[True], [False]]
