"""The front end that contributors copy, under `elasticdl run`: workers that come, leave and are killed make the steps of one."""

import signal
from pathlib import Path

import pytest
from running_job import read_curve, run_alone, start

SCRIPT = Path(__file__).parents[1] / "small_front_end.py"


@pytest.mark.slow
def test_workers_join_and_are_killed(tmp_path):
    alone, folder = tmp_path / "alone", tmp_path / "elastic"
    for each in (alone, folder):
        each.mkdir()
    run_alone(SCRIPT, "plain", alone)
    slow, curve = folder / "slow", folder / "curve"
    slow.touch()
    options = ["--num_workers", "2", "--collective", "torch", "--", "python", str(SCRIPT), "elastic", str(folder)]
    with start(tmp_path, "run", *options) as job:
        job.wait_for_rows(curve)
        for rank in (0, 1):
            world = job.entries("world_formed")[-1]
            job.signal(world["members"][rank], signal.SIGKILL)
            job.wait_for_world_without(world["members"][rank])
            job.wait_for_rows(curve)
        job.scale(3)
        job.wait_for_world(size=3)
        job.wait_for_rows(curve)
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), job.entries("warning")
    ((ours,), (theirs,)) = (zip(*read_curve(each / "end"), strict=True) for each in (folder, alone))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
