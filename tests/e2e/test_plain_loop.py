"""A plain PyTorch loop under `elasticdl run`, with real processes: alone and elastically it makes the same steps."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import DEADLINE, REPOSITORY, run_cli, start

SCRIPTS = Path(__file__).parent / "scripts"
WARM = ["torch", "torch._dynamo", "elasticdl.elastic.torch"]
EPOCHS = 12
STEPS = 11 * EPOCHS


def read_curve(path):
    """The rows that were written in full, each with what the script's counters say, the loss and the rate."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(map(float, line.split())) for line in lines if line.endswith("\n")]


def curve_of(alone, script, curve, *arguments):
    alone.run_well(SCRIPTS / script, curve, *arguments)
    return read_curve(curve)


@pytest.fixture(scope="module")
def plain_curve(alone, tmp_path_factory):
    curve = curve_of(alone, "plain_classifier.py", tmp_path_factory.mktemp("plain") / "curve", str(EPOCHS))
    assert [row[0] for row in curve] == list(range(1, STEPS + 1))
    return curve


def require_same(ours, theirs):
    """All that the scripts have written; the numbers of the loops to the letter."""
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {mine[0]}"


def waits_for_steps(job, curve):
    def wait_for_steps(number=3):
        made = len(read_curve(curve))
        job.wait_for(f"{number} steps", lambda: len(read_curve(curve)) >= made + number)

    return wait_for_steps


@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=pytest.mark.slow)])
def test_workers_join_leave_and_are_killed(plain_curve, tmp_path, engine):
    """The first who joins is told to leave while it makes up for the others' steps, and they wait."""
    curve, slow, on_its_way = tmp_path / "elastic", tmp_path / "slow", tmp_path / "on its way"
    slow.touch()
    on_its_way.touch()
    env = {"TEST_SLOW_WHILE": str(slow), "TEST_SLOW_TO_CATCH_UP": str(on_its_way)}
    script = ["python", str(SCRIPTS / "plain_classifier.py"), str(curve), str(EPOCHS)]
    with start(tmp_path, "run", "--num_workers", "2", "--collective", engine, "--", *script, **env) as job:
        wait_for_steps = waits_for_steps(job, curve)
        wait_for_steps(10)
        job.scale(3)
        left_soon = job.wait_for_world(size=3)
        job.signal(left_soon["members"][2], signal.SIGTERM)
        job.wait_for("its end", lambda: job.entries("worker_left"))
        assert job.entries("worker_left")[0]["cause"] == "drained"
        on_its_way.unlink()
        joined = job.wait_for_world(size=3, after=left_soon["world"])
        wait_for_steps()
        job.signal(joined["members"][1], signal.SIGKILL)
        killed = job.wait_for_world_without(joined["members"][1])
        wait_for_steps()
        job.signal(killed["members"][0], signal.SIGTERM)
        job.wait_for_world_without(killed["members"][0])
        wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert left_soon["world"] not in [pause["world"] for pause in job.entries("pause")]  # it has made no step
        assert [each["epoch"] for each in job.entries("epoch_finished")] == list(range(EPOCHS))
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
    assert not job.entries("warning"), job.entries("warning")
    require_same(read_curve(curve), plain_curve)


def test_a_newcomer_with_other_data_is_refused_alone_and_tried_again(plain_curve, tmp_path):
    """A file has grown; a moment later it is again as it was."""
    data, curve, slow = tmp_path / "data", tmp_path / "elastic", tmp_path / "slow"
    data.write_text(1000 * ".")
    slow.touch()
    env = {"TEST_SLOW_WHILE": str(slow), "TEST_DATA": str(data)}
    script = ["python", str(SCRIPTS / "plain_classifier.py"), str(curve), str(EPOCHS)]
    with start(tmp_path, "run", "--num_workers", "1", "--collective", "torch", "--", *script, **env) as job:
        waits_for_steps(job, curve)()
        data.write_text(1100 * ".")
        job.scale(1, 2)
        job.wait_for("its refusal", lambda: job.entries("worker_left"))
        data.write_text(1000 * ".")
        job.wait_for("another", lambda: any(2 in each["members"] for each in job.entries("world_formed")))
        slow.unlink()
        assert job.finish() == 0, job.describe()
        (left,) = [entry for entry in job.entries("worker_left") if entry["cause"] != "finished"]
    assert "refused: its training data have 1100 samples, the job's 1000: " in left["reason"]
    require_same(read_curve(curve), plain_curve)


@pytest.mark.parametrize(
    "kind",
    [
        "scaled",
        "moving",
        pytest.param("accumulate", marks=pytest.mark.slow),
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_what_peoples_loops_have(alone, tmp_path, kind):
    epochs = {"accumulate": "16", "scaled": "6", "compiled": "6", "moving": "6"}[kind]
    plain = curve_of(alone, "plain_features.py", tmp_path / "alone", epochs, kind)
    curve, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    script = ["python", str(SCRIPTS / "plain_features.py"), str(curve), epochs, kind]
    with start(
        tmp_path, "run", "--num_workers", "2", "--collective", "torch", "--", *script, TEST_SLOW_WHILE=str(slow)
    ) as job:
        wait_for_steps = waits_for_steps(job, curve)
        wait_for_steps()
        job.signal(0, signal.SIGKILL)
        job.wait_for(
            "its replacement in a world", lambda: any(2 in each["members"] for each in job.entries("world_formed"))
        )
        wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), job.entries("warning")
    require_same(read_curve(curve), plain)


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_an_example_of_run_ais_needs_one_line_more(alone, tmp_path, workers):
    """Alone it is their loop, without that line."""
    plain = curve_of(alone, "runai_example_torch.py", tmp_path / "alone", "6", "bare")
    curve, slow = tmp_path / "elastic", tmp_path / "slow"
    slow.touch()
    script = ["python", str(SCRIPTS / "runai_example_torch.py"), str(curve), "6"]
    command = ["--num_workers", str(workers), "--collective", "torch", "--", *script]
    with start(tmp_path, "run", *command, TEST_SLOW_WHILE=str(slow)) as job:
        wait_for_steps = waits_for_steps(job, curve)
        wait_for_steps(6)
        if workers > 1:
            job.signal(0, signal.SIGKILL)
            job.wait_for("another", lambda: any(workers in each["members"] for each in job.entries("world_formed")))
            wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert not job.entries("warning"), job.entries("warning")
        assert "elasticdl.elastic.steps 4 16" in job.output
    require_same(read_curve(curve), plain)


FROM_TORCHRUN = REPOSITORY / "examples" / "from_torchrun"


def test_what_becomes_of_a_loop_for_torchrun(alone, tmp_path):
    """With Horovod, whose world must last until the scripts of all workers are done."""
    script = str(FROM_TORCHRUN / "elastic_ddp.py")
    with start(tmp_path, "run", "--num_workers", "2", "--collective", "horovod", "--", "python", script) as job:
        assert job.finish() == 0, job.describe()
        assert len(job.entries("world_formed")) == 1, job.describe()
        said = [line for worker in (0, 1) for line in job.job.worker_log(worker).read_text().splitlines()]
    assert epochs_said(said) == epochs_said(alone.run_well(script).splitlines()) != []


@pytest.mark.slow
def test_it_says_what_the_loop_for_torchrun_says(alone):
    theirs = subprocess.run(
        [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2", FROM_TORCHRUN / "ddp.py"],
        check=True,
        timeout=DEADLINE,
        capture_output=True,
        text=True,
    )
    ours = alone.run_well(FROM_TORCHRUN / "elastic_ddp.py")
    assert epochs_said(ours.splitlines()) == epochs_said(theirs.stdout.splitlines()) != []


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (["torchrun", "train.py"], "torchrun starts workers of its own"),
        (["python", "-m", "torch.distributed.run", "train.py"], "torch.distributed.run starts workers of its own"),
        (["python", "-u", "no/such.py", "--epochs", "3"], "no/such.py: name the script as it is called from"),
    ],
)
def test_a_program_that_can_not_be_had_is_refused_before_anything_starts(tmp_path, program, told):
    done = run_cli(tmp_path, "run", "--", *program)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("jobs/*"))


def epochs_said(lines):
    return [list(map(float, re.findall(r"[\d.]+", line))) for line in lines if line.startswith("epoch ")]


@pytest.mark.slow
def test_the_example_says_the_same_on_two_workers(alone, tmp_path):
    example = str(REPOSITORY / "examples" / "plain_loop.py")
    plain = alone.run_well(example)
    with start(tmp_path, "run", "--num_workers", "2", "--collective", "torch", "--", "python", example) as job:
        assert job.finish() == 0, job.describe()
        said = [line for log in sorted(job.job.logs.glob("*.log")) for line in log.read_text().splitlines()]
    assert len(epochs_said(said)) == 10
    for ours, theirs in zip(epochs_said(said), epochs_said(plain.splitlines()), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)


def test_what_cant_be_had_is_one_line(alone, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, elasticdl.elastic.torch as elastic\n"
        "model = torch.nn.SyncBatchNorm(3)\n"
        "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3)))\n"
        "elastic.prepare(model, torch.optim.SGD(model.parameters()), loader)\n"
    )
    ended = alone.run(script)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    words = (
        "elastic.prepare: the model is a SyncBatchNorm, which needs a process group: leave convert_sync_batchnorm out"
    )
    assert line.endswith(words)
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(script)) as job:
        assert job.finish() == 1
    assert words in job.output
