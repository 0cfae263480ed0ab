"""A plain PyTorch loop under `elasticdl run`, with real processes: alone and elastically it makes the same steps."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import DEADLINE, REPOSITORY, run_cli, start

SCRIPTS = Path(__file__).parent / "scripts"
EPOCHS = 12
STEPS = 11 * EPOCHS


def read_curve(path):
    """The rows that were written in full, each with what the script's counters say, the loss and the rate."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(map(float, line.split())) for line in lines if line.endswith("\n")]


def train_alone(script, curve, *arguments):
    command = [sys.executable, str(SCRIPTS / script), str(curve), *arguments]
    subprocess.run(command, check=True, timeout=DEADLINE, cwd=REPOSITORY)
    return read_curve(curve)


def require_same(ours, theirs):
    """All that the scripts have written; the numbers of the loops to the letter."""
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {mine[0]}"


@pytest.mark.parametrize("engine", ["torch", "horovod"])
def test_workers_join_leave_and_are_killed(tmp_path, engine):
    alone = train_alone("plain_classifier.py", tmp_path / "alone", str(EPOCHS))
    assert [row[0] for row in alone] == list(range(1, STEPS + 1))
    curve, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    script = ["python", str(SCRIPTS / "plain_classifier.py"), str(curve), str(EPOCHS)]
    with start(
        tmp_path, "run", "--num_workers", "2", "--collective", engine, "--", *script, TEST_SLOW_WHILE=str(slow)
    ) as job:

        def wait_for_steps(number=3):
            made = len(read_curve(curve))
            job.wait_for(f"{number} steps", lambda: len(read_curve(curve)) >= made + number)

        wait_for_steps()
        assert run_cli(tmp_path, "scale", "job", "3").returncode == 0
        joined = job.wait_for_world(size=3)
        wait_for_steps()
        job.signal(joined["members"][1], signal.SIGKILL)
        killed = job.wait_for_world_without(joined["members"][1])
        wait_for_steps()
        job.signal(killed["members"][0], signal.SIGTERM)
        job.wait_for_world_without(killed["members"][0])
        wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
    assert not job.entries("warning"), job.entries("warning")
    require_same(read_curve(curve), alone)


@pytest.mark.parametrize("kind", ["accumulate", "scaled", "compiled"])
def test_what_peoples_loops_have(tmp_path, kind):
    epochs = {"accumulate": "16", "scaled": "6", "compiled": "6"}[kind]
    alone = train_alone("plain_features.py", tmp_path / "alone", epochs, kind)
    curve, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    script = ["python", str(SCRIPTS / "plain_features.py"), str(curve), epochs, kind]
    with start(
        tmp_path, "run", "--num_workers", "2", "--collective", "torch", "--", *script, TEST_SLOW_WHILE=str(slow)
    ) as job:

        def wait_for_steps(number=3):
            made = len(read_curve(curve))
            job.wait_for(f"{number} steps", lambda: len(read_curve(curve)) >= made + number)

        wait_for_steps()
        job.signal(0, signal.SIGKILL)
        job.wait_for(
            "its replacement in a world", lambda: any(2 in each["members"] for each in job.entries("world_formed"))
        )
        wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), job.entries("warning")
    require_same(read_curve(curve), alone)
