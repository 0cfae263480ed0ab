"""Scripts that are stopped and run again: the second job goes on where the first has ended, and what rank 0 prints is on the terminal."""

import re
import signal
from pathlib import Path

import pytest
from running_job import QUICK_KERAS, run_alone, start

from elasticdl.job.jobdir import kept_states

SCRIPTS = Path(__file__).parent / "scripts"
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
STEPS = 120


def steps_of(job):
    return max((entry["step"] for entry in job.entries("steps")), default=0)


def final(text):
    """What a script says in the end, once."""
    (line,) = [line for line in text.splitlines() if line.startswith("final")]
    return line


def stop(job):
    """In the middle of an epoch, or where it ends."""
    before = max(steps_of(job), 20)
    job.wait_for("some steps more", lambda: steps_of(job) >= before + 5)
    job.stop()
    assert job.finish() == 1, job.describe()
    *_, kept = job.entries("checkpoint")  # those before it are the script's own
    assert kept["step"] < STEPS, "it was stopped too late"
    assert f"  kept in {kept['path']}: the same command, with --job_name job, goes on from there\n" in job.output
    return kept["step"]


def run(home, workers, kind, slow):
    script = ["stopped_keras.py"] if kind == "keras" else ["stopped.py", kind]
    folder = [str(home / "own")] if kind == "trainer" else []
    command = ["--num_workers", workers, "--collective", "torch", "--", "python", str(SCRIPTS / script[0]), *script[1:]]
    env = {**OFFLINE, **(QUICK_KERAS if kind == "keras" else {})}
    return start(home, "run", *command, *folder, TEST_SLOW_WHILE=str(slow), **env)


def test_what_a_script_prints_and_trains_goes_on_over_a_kill_and_a_stop(tmp_path):
    plain, slow = run_alone(SCRIPTS / "stopped.py", "plain", **OFFLINE), tmp_path / "slow"
    slow.touch()
    with run(tmp_path, "2", "plain", slow) as job:
        job.wait_for("a few steps", lambda: steps_of(job) >= 5)
        killed = job.entries("world_formed")[-1]["members"][0]
        job.signal(killed, signal.SIGKILL)
        job.wait_for_world_without(killed)
        stopped = stop(job)
        said = job.output
    slow.unlink()
    with run(tmp_path, "1", "plain", slow) as job:
        assert job.finish() == 0, job.describe()
        assert [entry["step"] for entry in job.entries("resumed")] == [stopped]
        assert not kept_states(job.job.path)
        said += job.output
    assert final(said) == final(plain)
    ours, theirs = ([line for line in text.splitlines() if line.startswith("step ")] for text in (said, plain))
    told = [int(re.findall(r"\d+", line)[0]) for line in ours]
    assert told == sorted(set(told))
    # Steps that were made, and not printed yet, as worker 0 was killed and the job was stopped.
    assert len(set(range(1, STEPS + 1)) - set(told)) <= 2
    assert set(ours) <= set(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["library", "lightning", "trainer", "keras"])
def test_a_stopped_training_ends_as_one_that_was_not(tmp_path, kind):
    slow = tmp_path / "slow"
    with run(tmp_path / "whole", "1", kind, slow) as job:
        assert job.finish() == 0, job.describe()
        expected = final(job.output)
    slow.touch()
    with run(tmp_path / "parts", "2", kind, slow) as job:
        stopped = stop(job)
    slow.unlink()
    with run(tmp_path / "parts", "1", kind, slow) as job:
        assert job.finish() == 0, job.describe()
        # Unless the trainer has just written a checkpoint of its own.
        resumed = [] if kind == "trainer" and stopped % 10 == 0 else [stopped]
        assert [entry["step"] for entry in job.entries("resumed")] == resumed
        assert final(job.output) == expected
