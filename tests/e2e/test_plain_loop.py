"""A plain PyTorch loop under `elasticdl run`, with real processes: alone and elastically it makes the same steps."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running_job import DEADLINE, REPOSITORY, read_curve, run_alone, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.documents.reading import changed, read

SCRIPTS = Path(__file__).parent / "scripts"
WHOLE = REPOSITORY / "examples" / "whole_script.py"
FROM_TORCHRUN = REPOSITORY / "examples" / "from_torchrun"
EPOCHS = 12
STEPS = 11 * EPOCHS


def curve_of(script, curve, *arguments):
    run_alone(SCRIPTS / script, curve, *arguments)
    return read_curve(curve)


def require_same(ours, theirs):
    """All that the scripts have written; the numbers of the loops to the letter."""
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {mine[0]}"


@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=pytest.mark.slow)])
def test_workers_join_leave_and_are_killed(tmp_path, engine):
    """The first who joins is told to leave while it makes up for the others' steps, and they wait."""
    plain = curve_of("plain_classifier.py", tmp_path / "plain", EPOCHS)
    assert [row[0] for row in plain] == list(range(1, STEPS + 1))
    curve, slow, on_its_way = tmp_path / "elastic", tmp_path / "slow", tmp_path / "on its way"
    slow.touch()
    on_its_way.touch()
    env = {"TEST_SLOW_WHILE": str(slow), "TEST_SLOW_TO_CATCH_UP": str(on_its_way)}
    script = ["python", str(SCRIPTS / "plain_classifier.py"), str(curve), str(EPOCHS)]
    with start(tmp_path, "run", "--num_workers", "2", "--collective", engine, "--", *script, **env) as job:
        job.wait_for_rows(curve, 10)
        job.scale(3)
        left_soon = job.wait_for_world(size=3)
        job.signal(left_soon["members"][2], signal.SIGTERM)
        job.wait_for("its end", lambda: job.entries("worker_left"))
        assert job.entries("worker_left")[0]["cause"] == "drained"
        on_its_way.unlink()
        joined = job.wait_for_world(size=3, after=left_soon["world"])
        job.wait_for_rows(curve)
        job.signal(joined["members"][1], signal.SIGKILL)
        killed = job.wait_for_world_without(joined["members"][1])
        job.wait_for_rows(curve)
        job.signal(killed["members"][0], signal.SIGTERM)
        job.wait_for_world_without(killed["members"][0])
        job.wait_for_rows(curve)
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert left_soon["world"] not in [pause["world"] for pause in job.entries("pause")]  # it has made no step
        assert [each["epoch"] for each in job.entries("epoch_finished")] == list(range(EPOCHS))
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
    assert not job.entries("warning"), job.entries("warning")
    require_same(read_curve(curve), plain)


def test_a_newcomer_that_sets_another_rate_is_refused_and_the_job_goes_on(tmp_path):
    plain = curve_of("plain_classifier.py", tmp_path / "plain", 6)
    curve, slow, other = tmp_path / "elastic", tmp_path / "slow", tmp_path / "other"
    slow.touch()
    script = ["python", str(SCRIPTS / "plain_classifier.py"), str(curve), "6"]
    options = ["--num_workers", "1-2", "--collective", "torch"]
    env = {"TEST_SLOW_WHILE": str(slow), "TEST_OTHER_RATE": str(other)}
    with start(tmp_path, "run", *options, "--", *script, **env) as job:
        job.wait_for_world(size=2)
        job.wait_for_rows(curve, 10)
        other.touch()
        job.signal(1, signal.SIGKILL)
        job.wait_for("a refusal", lambda: [each for each in job.entries("worker_left") if each["worker"] > 1])
        refused = next(each for each in job.entries("worker_left") if each["worker"] > 1)
        slow.unlink()
        assert job.finish() == 0, job.describe()
    assert "refused: after step" in refused["reason"]
    assert " on worker 0 and 0.3 on worker " in refused["reason"]
    require_same(read_curve(curve), plain)


def test_what_peoples_loops_have(tmp_path):
    """Among it a checkpoint of their own, which the worker reads that takes the place of one that was killed."""
    plain = curve_of("plain_features.py", tmp_path / "alone", 6)
    curve, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    script = ["python", str(SCRIPTS / "plain_features.py"), str(curve), "6"]
    options = ["--num_workers", "2", "--collective", "torch"]
    with start(tmp_path, "run", *options, "--", *script, TEST_SLOW_WHILE=str(slow)) as job:
        job.wait_for_rows(curve, 20)
        job.signal(0, signal.SIGKILL)
        job.wait_for("its heir", lambda: any(2 in each["members"] for each in job.entries("world_formed")))
        job.wait_for_rows(curve)
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), job.entries("warning")
    require_same(read_curve(curve), plain)
    assert 1 <= int((tmp_path / "elastic.begun").read_text()) < 6


def rows_of(folder):
    log = folder / "log.csv"
    lines = log.read_text().splitlines(keepends=True)[1:] if log.exists() else []
    return [tuple(map(float, line.split(","))) for line in lines if line.endswith("\n")]


def on_the_board(folder):
    """Of each number that TensorBoard shows, its steps."""
    board = EventAccumulator(str(folder)).Reload()
    return {name: [each.step for each in board.Scalars(name)] for name in board.Tags()["scalars"]}


def test_a_whole_script_writes_each_step_once(tmp_path):
    """Rank 0 is killed, its heir is told to leave, others join; then it goes on from its checkpoint. It is compared with the script for one device."""
    steps = 15 * 8
    (difference,) = (
        each.text
        for each in read(REPOSITORY / "docs" / "whole_script.md").steps
        if getattr(each, "language", "") == "diff"
    )
    plain = tmp_path / "plain.py"
    plain.write_text(changed(WHOLE.read_text(), difference, undone=True))
    assert "elastic." not in plain.read_text()
    bars = SCRIPTS / "slow_bars.py"
    run_alone(bars, plain, "--out", tmp_path / "plain", "--epochs", 8, TEST_SLOW_WHILE="")
    out, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    script = ["python", str(bars), str(WHOLE), "--out", str(out), "--epochs", "8"]
    with start(
        tmp_path, "run", "--num_workers", "2", "--collective", "torch", "--", *script, TEST_SLOW_WHILE=str(slow)
    ) as job:

        def wait_for_rows():
            made = len(rows_of(out))
            job.wait_for("3 steps", lambda: len(rows_of(out)) >= made + 3)

        wait_for_rows()
        job.signal(0, signal.SIGKILL)
        job.wait_for("its heir", lambda: any(2 in each["members"] for each in job.entries("world_formed")))
        wait_for_rows()
        job.signal(1, signal.SIGTERM)
        left = job.wait_for_world_without(1)
        wait_for_rows()
        job.scale(3)
        job.wait_for_world(size=3, after=left["world"])
        wait_for_rows()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), job.entries("warning")
    assert [row[0] for row in rows_of(out)] == list(range(1, steps + 1))
    for mine, expected in zip(rows_of(out), rows_of(tmp_path / "plain"), strict=True):
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-5), f"step {mine[0]:.0f}"
    assert on_the_board(out) == on_the_board(tmp_path / "plain")
    best, expected = (torch.load(folder / "best.pt") for folder in (out, tmp_path / "plain"))
    torch.testing.assert_close(best, expected, rtol=1e-4, atol=1e-5)
    run_alone(bars, WHOLE, "--out", out, "--epochs", 9, "--resume", TEST_SLOW_WHILE="")
    assert [row[0] for row in rows_of(out)] == list(range(1, steps + 16))


def epochs_said(lines):
    return [list(map(float, re.findall(r"[\d.]+", line))) for line in lines if line.startswith("epoch ")]


def test_what_becomes_of_a_loop_for_torchrun(tmp_path):
    """With Horovod, whose world must last until the scripts of all workers are done."""
    script = FROM_TORCHRUN / "elastic_ddp.py"
    with start(tmp_path, "run", "--num_workers", "2", "--collective", "horovod", "--", "python", str(script)) as job:
        assert job.finish() == 0, job.describe()
        assert len(job.entries("world_formed")) == 1, job.describe()
        said = epochs_said(job.said())
    assert said == epochs_said(run_alone(script).splitlines()) != []


@pytest.mark.slow
def test_it_says_what_the_loop_for_torchrun_says():
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, FROM_TORCHRUN / "ddp.py"]
    theirs = subprocess.run(command, check=True, timeout=DEADLINE, capture_output=True, text=True)
    ours = run_alone(FROM_TORCHRUN / "elastic_ddp.py")
    assert epochs_said(ours.splitlines()) == epochs_said(theirs.stdout.splitlines()) != []


OWN_STEPS = """
import torch, elasticdl.elastic, elasticdl.elastic.torch
elasticdl.elastic.torch.init(8, 4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(elasticdl.elastic.batch_size, 2)).mean().backward()
optimizer.step()
"""


def test_what_refuses_before_the_job_is_joined_says_so_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import elasticdl.elastic.torch as elastic\nelastic.prepare(None)\n")
    with start(tmp_path, "run", "--num_workers", "2", "--", "python", str(script)) as job:
        assert job.finish() != 0
        assert {each["worker"] for each in job.entries("worker_launched")} == {0, 1}, job.describe()
        assert "Traceback" not in job.output


def test_a_loop_that_was_not_prepared_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OWN_STEPS)
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(script)) as job:
        assert job.finish() == 1
    assert "optimizer.step() under `elasticdl run`, before the loop was prepared" in job.output
