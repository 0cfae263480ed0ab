"""Lightning's trainer under `elasticdl run`, with real processes: alone and elastically it makes the same steps."""

import csv
import re
import signal
from pathlib import Path

import pytest
from running_job import run_alone, start

pytest.importorskip("lightning")
SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "lightning_example.py"
LOGS = {"classifier": "digits", "language_model": "words", "gan": "gan"}


def read_log(folder):
    """Of each key the rows in which it was logged, by all workers that were rank 0: step, epoch, value."""
    earlier = sorted(folder.glob("metrics_*.csv"), key=lambda path: int(path.stem.partition("_")[2]))
    try:
        texts = [path.read_text() for path in (*earlier, *folder.glob("metrics.csv"))]
    except FileNotFoundError:  # A new rank 0 has just renamed the file of the one before.
        return read_log(folder)
    found = {}
    for row in (row for text in texts for row in csv.DictReader(text.splitlines())):
        for key, value in row.items():
            if key not in ("step", "epoch") and value:
                found.setdefault(key, []).append((int(row["step"]), row["epoch"], float(value)))
    return found


def steps_made(folder):
    rows = [rows for key, rows in read_log(folder).items() if key.startswith(("train_loss", "loss"))]
    return max((row[0] for each in rows for row in each), default=0)


def ended(lines):
    """What the script says at its end: steps, epochs, and metrics by name."""
    (line,) = [line for line in lines if line.startswith("ended ")]
    _, step, epoch = line.split(" (")[0].split()
    return int(step), int(epoch), {key: float(value) for key, value in re.findall(r"\('(\w+)', ([\d.e-]+)\)", line)}


def require_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, rows in theirs.items():
        assert [row[:2] for row in ours[key]] == [row[:2] for row in rows], key
        for mine, expected in zip(ours[key], rows, strict=True):
            assert mine[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-6), f"{key}, step {mine[0]}"


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "name",
    ["classifier", pytest.param("language_model", marks=pytest.mark.slow), pytest.param("gan", marks=pytest.mark.slow)],
)
def test_workers_join_leave_and_are_killed(tmp_path, name):
    plain, elastic, slow = tmp_path / "plain", tmp_path / "elastic", tmp_path / "slow"
    expected = ended(run_alone(SCRIPT, name, plain, "auto").splitlines())
    slow.touch()
    script = ["python", str(SCRIPT), name, str(elastic), "elastic"]
    options = ["--num_workers", "2", "--collective", "torch"]
    log = elastic / LOGS[name]
    with start(tmp_path, "run", *options, "--", *script, TEST_SLOW_WHILE=str(slow)) as job:

        def wait_for_steps():
            made = steps_made(log)
            job.wait_for("some steps", lambda: steps_made(log) >= made + 3)

        wait_for_steps()
        job.scale(3)
        joined = job.wait_for_world(size=3)
        wait_for_steps()
        job.signal(joined["members"][2], signal.SIGKILL)
        killed = job.wait_for_world_without(joined["members"][2])
        wait_for_steps()
        job.signal(killed["members"][0], signal.SIGTERM)
        job.wait_for_world_without(killed["members"][0])
        wait_for_steps()
        job.scale(1)
        job.wait_for_world(size=1, after=killed["world"] + 1)
        wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
        elastically = ended(job.said())
    # A kill may come while the members agree on something, which is told.
    warnings = [each for each in job.entries("warning") if "a decision is each worker's own" not in each["message"]]
    assert not warnings
    require_same(read_log(log), read_log(plain / LOGS[name]))
    assert checkpoints(elastic) == checkpoints(plain)
    assert elastically[:2] == expected[:2]
    assert elastically[2] == pytest.approx(expected[2], rel=1e-5)


def test_a_checkpoint_of_two_workers_is_resumed_by_three_as_by_lightning_itself(tmp_path):
    script, slow = SCRIPTS / "lightning_resumes.py", tmp_path / "slow"

    def run(folder, workers, *arguments, kills=False):
        command = ["python", str(script), str(folder), "elastic", *arguments]
        options = ["--num_workers", workers, "--collective", "torch", "--", *command]
        with start(folder, "run", *options, TEST_SLOW_WHILE=str(slow)) as job:
            if kills:
                job.wait_for("a step", lambda: read_log(folder / "log").get("loss"))
                job.signal(1, signal.SIGKILL)
                job.wait_for("its heir", lambda: any(3 in each["members"] for each in job.entries("world_formed")))
                slow.unlink()
            assert job.finish() == 0, job.describe()
            return [line for line in job.said() if line.startswith("predicted")]

    run(tmp_path / "first", "2", "2")
    checkpoint = str(tmp_path / "first" / "epoch=1.ckpt")
    said = run_alone(script, tmp_path / "plain", "auto", "4", checkpoint).splitlines()
    slow.touch()
    ours = run(tmp_path / "ours", "3", "4", checkpoint, kills=True)
    assert ours == [line for line in said if line.startswith("predicted")] != []
    require_same(read_log(tmp_path / "ours" / "log"), read_log(tmp_path / "plain" / "log"))
