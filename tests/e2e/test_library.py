"""A script of the user's own under `elasticdl run`, with real processes and real Horovod."""

import signal
import sys
from pathlib import Path

import pytest
from running_job import start

SCRIPT = str(Path(__file__).parent / "scripts" / "own_loader.py")
WARM = ["torch", "torch._dynamo", "elasticdl.elastic.torch"]
EPOCHS = 15
STEPS = 6 * EPOCHS


def read_curve(path: Path) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate of each step that was written in full."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    return [(int(step), float(loss), float(rate)) for step, loss, rate in rows]


@pytest.fixture(scope="module")
def plain_curve(alone, tmp_path_factory):
    curve = tmp_path_factory.mktemp("plain") / "curve"
    alone.run_well(SCRIPT, curve, str(EPOCHS))
    return read_curve(curve)


def test_the_only_worker_leaves_when_another_has_its_state_and_one_more_joins(plain_curve, tmp_path):
    """With torch's own loader and a schedule."""
    elastic, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    arguments = ["--num_workers", "1", "--stop_grace", "120", "--", "python", SCRIPT, str(elastic), str(EPOCHS)]
    with start(tmp_path, "run", *arguments, TEST_SLOW_WHILE=str(slow)) as job:
        job.wait_for("a few steps of one worker", lambda: len(read_curve(elastic)) > 3)
        job.signal(0, signal.SIGTERM)
        heir = job.wait_for_world(size=1, after=1)
        assert heir["step"] > 3
        job.scale(2)
        job.wait_for_world(size=2, after=heir["world"])
        made = len(read_curve(elastic))
        job.wait_for("a few steps of two workers", lambda: len(read_curve(elastic)) > made + 3)
        slow.unlink()  # all has happened: the rest may be as fast as it can
        assert job.finish() == 0, job.describe()
        assert [world["members"] for world in job.entries("world_formed")] == [[0], [0, 1], [1], [1, 2]]
        assert [left["cause"] for left in job.entries("worker_left")] == ["drained", "finished", "finished"]
        assert not job.entries("resumed")
    ours = read_curve(elastic)
    assert [step for step, _, _ in ours] == [step for step, _, _ in plain_curve] == list(range(1, STEPS + 1))
    for (step, loss, rate), (_, expected_loss, expected_rate) in zip(ours, plain_curve, strict=True):
        assert rate == expected_rate, f"step {step}"
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7), f"step {step}"


def test_the_only_worker_whose_time_is_over_leaves_its_state_to_the_next(plain_curve, tmp_path):
    elastic, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    late = f'test "$ELASTICDL_WORKER_ID" = 0 || while test -e {slow}; do sleep 0.1; done; exec "$@"'
    command = ["sh", "-c", late, "sh", sys.executable, SCRIPT, str(elastic), str(EPOCHS)]
    arguments = ["--num_workers", "1", "--stop_grace", "8", "--", *command]
    with start(tmp_path, "run", *arguments, TEST_SLOW_WHILE=str(slow)) as job:
        job.wait_for("a few steps", lambda: len(read_curve(elastic)) > 3)
        job.signal(0, signal.SIGTERM)
        job.wait_for("its end", lambda: job.entries("worker_left"))
        slow.unlink()
        assert job.finish() == 0, job.describe()
        (resumed,) = job.entries("resumed")
        assert [world["members"] for world in job.entries("world_formed")] == [[0], [1]]
        assert not list(job.job.path.glob("handover-*"))
    assert 3 < resumed["step"] < STEPS
    ours = read_curve(elastic)
    assert [step for step, _, _ in ours] == list(range(1, STEPS + 1))
    assert ours == [pytest.approx(row, rel=1e-5, abs=1e-7) for row in plain_curve]


def test_what_is_raised_before_training_fails_the_job_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, time\n"
        "atexit.register(time.sleep, 4)  # longer than a silent worker is waited for\n"
        "import elasticdl.elastic.torch as elastic\n"
        "elastic.init(4, 4)\n"
        "raise ValueError('not yet trained')\n"
    )
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(script)) as job:
        assert job.finish() == 1
    assert job.output.count("Traceback") == 1
    assert f"job job failed: {script}:5: ValueError: not yet trained" in job.output
    assert len(job.entries("worker_started")) == 1
