"""A script with Run:AI's API, on today's Keras: plain ``fit``, through worlds that change inside it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import REPOSITORY, run_cli, start

SCRIPT = str(Path(__file__).parent / "scripts" / "runai_keras.py")
EPOCHS = "100"  # enough for a newcomer to get ready while the training is slow


def lines(log, word):
    return [json.loads(line) for line in re.findall(rf"^{word} (.*)$", log, re.M)]


def test_fit_goes_on_while_a_worker_joins_and_gives_what_one_alone_gives(tmp_path):
    env = {**os.environ, "TEST_EPOCHS": EPOCHS}
    alone = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=120, env=env, cwd=REPOSITORY, check=False
    )
    assert alone.returncode == 0, alone.stderr[-2000:]
    slow = tmp_path / "slow"
    slow.touch()
    command = ["run", "--num_workers", "1", "--", sys.executable, SCRIPT]
    with start(tmp_path, *command, TEST_EPOCHS=EPOCHS, TEST_SLOW_WHILE=str(slow)) as job:
        world = job.wait_for_world(size=1)
        assert run_cli(tmp_path, "scale", "job", "2").returncode == 0
        job.wait_for_world(size=2, after=world["world"])
        slow.unlink()
        assert job.finish() == 0, job.describe()
        first, newcomer = (job.job.worker_log(worker).read_text() for worker in (0, 1))
    wanted, got = lines(alone.stdout, "history")[0], lines(first, "history")[0]
    assert got.keys() == wanted.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in wanted.items():
        assert got[name] == pytest.approx(values, rel=1e-3, abs=1e-4), name
    assert lines(newcomer, "history") == [got], "a newcomer's history is the job's"
    sizes = [(step["gpus"], step["steps"]) for step in lines(first, "step")]
    assert sizes[0] == (1, 4)
    assert sizes[-1] == (2, 2)
    assert [step["batch"] for step in lines(first, "step")] == [0, 1, 2, 3, 4] * int(EPOCHS)
