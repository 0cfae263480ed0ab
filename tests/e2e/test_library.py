"""A script of the user's own under `elasticdl run`, with real processes and real Horovod."""

import signal
import sys
from pathlib import Path

import pytest
from running_job import read_curve, run_alone, start

SCRIPT = Path(__file__).parent / "scripts" / "own_loader.py"
EPOCHS = 15
STEPS = 6 * EPOCHS


def test_the_only_worker_leaves_its_state_to_the_next_and_one_more_joins(tmp_path):
    """With torch's own loader, processes that load data, and a schedule."""
    plain, elastic, slow, alone = (tmp_path / name for name in ("plain", "elastic", "slow", "alone"))
    run_alone(SCRIPT, plain, EPOCHS)
    slow.touch()
    alone.touch()
    late = f'test "$ELASTICDL_WORKER_ID" = 0 || while test -e {alone}; do sleep 0.1; done; exec "$@"'
    command = ["sh", "-c", late, "sh", sys.executable, str(SCRIPT), str(elastic), str(EPOCHS)]
    with start(
        tmp_path, "run", "--num_workers", "1", "--stop_grace", "8", "--", *command, TEST_SLOW_WHILE=str(slow)
    ) as job:
        job.wait_for_rows(elastic)
        job.signal(0, signal.SIGTERM)  # nobody is there who could take its state
        job.wait_for("its end", lambda: job.entries("worker_left"))
        alone.unlink()
        heir = job.wait_for_world(size=1, after=1)
        job.scale(2)
        both = job.wait_for_world(size=2, after=heir["world"])
        job.wait_for_rows(elastic)
        job.signal(both["members"][0], signal.SIGKILL)
        job.wait_for_world_without(both["members"][0])
        job.wait_for_rows(elastic)
        slow.unlink()  # all has happened: the rest may be as fast as it can
        assert job.finish() == 0, job.describe()
        assert [world["members"] for world in job.entries("world_formed")][:3] == [[0], [1], [1, 2]]
        (resumed,) = job.entries("resumed")
        assert not list(job.job.path.glob("stopped-*"))
    assert 3 < resumed["step"] < STEPS
    ours, expected = read_curve(elastic), read_curve(plain)
    assert [row[0] for row in expected] == list(range(1, STEPS + 1))
    # What a rank 0 that was killed did not come to write, nobody wrote.
    assert len(ours) >= STEPS - 1
    rows = {row[0]: row for row in expected}
    assert ours == [pytest.approx(rows[row[0]], rel=1e-5, abs=1e-7) for row in ours]
