"""Scripts of every front end as whole jobs: whatever becomes of the workers and of the job, the model is that of one device."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import DEADLINE, QUICK_KERAS, REPOSITORY, read_curve, run, start

from elasticdl.job.jobdir import kept_states
from tests.documents.reading import changed, read

SCRIPTS = Path(__file__).parent / "scripts"
WHOLE = REPOSITORY / "examples" / "whole_script.py"
FROM_TORCHRUN = REPOSITORY / "examples" / "from_torchrun"
SMALL = REPOSITORY / "tests" / "small_front_end.py"
# By front end: its script, which is given a folder at the end, and who sums gradients.
FRONT_ENDS = {
    "plain": ([SCRIPTS / "trained.py", "plain"], "horovod"),
    "library": ([SCRIPTS / "trained.py", "library"], "torch"),
    "lightning": ([SCRIPTS / "trained.py", "lightning"], "torch"),
    "trainer": ([SCRIPTS / "trained.py", "trainer"], "horovod"),
    "keras": ([SCRIPTS / "trained_keras.py", "once"], "torch"),
    "keras, fit again": ([SCRIPTS / "trained_keras.py", "again"], "torch"),
    "small": ([SMALL, "elastic"], "torch"),
    "FSDP2": ([SCRIPTS / "trained_shared.py", "fsdp"], "torch"),
    "tensor parallel": ([SCRIPTS / "trained_shared.py", "tensor"], "torch"),
    "lightning, FSDP2": ([SCRIPTS / "trained_shared_lightning.py", "fsdp"], "torch"),
    "lightning, tensor parallel": ([SCRIPTS / "trained_shared_lightning.py", "tensor"], "torch"),
}
SHARED = ("FSDP2", "tensor parallel", "lightning, FSDP2", "lightning, tensor parallel")  # by two processes of a worker


def environment(name):
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(QUICK_KERAS if "keras" in name else {})}


# A kill may come while the members agree on something, and of a second fit a rank 0 that leaves keeps nothing.
EXPECTED = re.compile("a decision is each worker's own|nothing is kept of step")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def run_alone(name, folder):
    return run([sys.executable, *map(str, FRONT_ENDS[name][0]), str(folder)], environment(name))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a front end's script does on one device: its folder, made once."""
    made = {}

    def folder_of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("alone")
            done = run_alone(name, made[name])
            assert done.returncode == 0, done.stderr
        return made[name]

    return folder_of


def start_script(home, name, workers, folder):
    script, engine = FRONT_ENDS[name]
    folder.mkdir(exist_ok=True)
    command = ["--num_workers", workers, "--collective", engine, "--processes_per_worker", str(1 + (name in SHARED))]
    command += ["--", "python", *map(str, script), str(folder)]
    return start(home, "run", *command, **environment(name))


def require_same(ours, theirs, missing):
    """Each step once, but for so many at most whose rank 0 was lost before it had written them; and the same end."""
    mine, expected = read_curve(ours), {row[0]: row for row in read_curve(theirs)}
    steps = [row[0] for row in mine]
    assert steps == sorted(set(steps)), "a step was made twice"
    assert len(expected) - missing <= len(mine) <= len(expected)
    for row in mine:
        assert row == pytest.approx(expected[row[0]], rel=1e-4, abs=1e-5), f"step {row[0]}"
    said, wanted = ((each / "end").read_text() if (each / "end").exists() else "" for each in (ours, theirs))
    assert NUMBER.sub("#", said) == NUMBER.sub("#", wanted)
    numbers = list(map(float, NUMBER.findall(wanted)))
    assert list(map(float, NUMBER.findall(said))) == pytest.approx(numbers, rel=1e-3, abs=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "lightning",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("library", "trainer", "keras, fit again", "small", *SHARED[1:])  # as to FSDP2: the storm
        ),
    ],
)
def test_workers_that_come_and_go_do_not_show(alone, tmp_path, name):
    expected, folder = alone(name), tmp_path / "elastic"
    folder.mkdir()
    (folder / "slow").touch()
    with start_script(tmp_path, name, "2", folder) as job:
        job.wait_for_rows(folder)
        job.scale(3)
        world = job.wait_for_world(size=3)
        job.wait_for_rows(folder)
        for rank, number in ((2, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGTERM)):
            if number == signal.SIGTERM:
                world = job.wait_for_world(size=3, after=world["world"] - 1)  # else there may be nobody who stays
            gone = world["members"][rank]
            job.signal(gone, number, of_one_process=name in SHARED)
            world = job.wait_for_world_without(gone)
            job.wait_for_rows(folder)
        job.scale(1)
        job.wait_for_world(size=1, after=world["world"])
        job.wait_for_rows(folder)
        (folder / "slow").unlink()
        assert job.finish() == 0, job.describe()
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
        told = [entry["message"] for entry in job.entries("warning")]
    assert [each for each in told if not EXPECTED.search(each)] == []
    require_same(folder, expected, missing=1)


@pytest.mark.parametrize("name", ["plain", "library", "lightning", "trainer", "keras", "FSDP2"])
@pytest.mark.slow
def test_the_only_worker_leaves_its_state_to_the_next_and_a_stopped_job_to_another(alone, tmp_path, name):
    expected, folder = alone(name), tmp_path / "parts"
    folder.mkdir()
    (folder / "slow").touch()
    with start_script(tmp_path, name, "1", folder) as job:
        job.wait_for_rows(folder)
        job.signal(0, signal.SIGTERM)
        job.wait_for("its heir", lambda: any(0 not in world["members"] for world in job.entries("world_formed")))
        job.wait_for_rows(folder, 5)
        job.stop()
        assert job.finish() == 1, job.describe()
        *_, kept = job.entries("checkpoint")  # those before it are the script's own
        assert f"  kept in {kept['path']}: the same command, with --job_name job, goes on from there\n" in job.output
        said = job.output
    (folder / "slow").unlink()
    with start_script(tmp_path, name, "2", folder) as job:
        assert job.finish() == 0, job.describe()
        # Unless the trainer has just written a checkpoint of its own.
        resumed = [] if name == "trainer" and kept["step"] % 7 == 0 else [kept["step"]]
        assert [entry["step"] for entry in job.entries("resumed")] == resumed
        assert not kept_states(job.job.path)
        said += job.output
    require_same(folder, expected, missing=2)
    if name == "plain":  # what rank 0 prints is on the terminal, once
        told = re.findall(r"^step (\d+)", said, re.M)
        assert len(told) == len(set(told)) >= len(read_curve(folder)) - 2


@pytest.mark.slow
def test_a_checkpoint_of_lightnings_is_resumed_as_by_lightning_itself(alone, tmp_path):
    folders = [tmp_path / "alone", tmp_path / "elastic"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(alone("lightning") / "kept" / "epoch=4.ckpt", folder / "begun.ckpt")
    assert run_alone("lightning", folders[0]).returncode == 0
    with start_script(tmp_path, "lightning", "2", folders[1]) as job:
        assert job.finish() == 0, job.describe()
    require_same(folders[1], folders[0], missing=0)


def test_what_the_documents_say_makes_a_script_for_one_device_elastic_is_all_that_does():
    steps = read(REPOSITORY / "docs" / "whole_script.md").steps
    (difference,) = (each.text for each in steps if getattr(each, "language", "") == "diff")
    assert "elastic." not in changed(WHOLE.read_text(), difference, undone=True)


@pytest.mark.slow
def test_what_becomes_of_a_loop_for_torchrun_says_the_same(tmp_path):
    """With Horovod, whose world must last until the scripts of all workers are done."""

    def epochs(lines):
        return [list(map(float, re.findall(r"[\d.]+", line))) for line in lines if line.startswith("epoch ")]

    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    how = {"check": True, "timeout": DEADLINE, "capture_output": True, "text": True}
    theirs = subprocess.run([*torchrun, FROM_TORCHRUN / "ddp.py"], **how).stdout
    script = ["--num_workers", "2", "--collective", "horovod", "--", "python", str(FROM_TORCHRUN / "elastic_ddp.py")]
    with start(tmp_path, "run", *script) as job:
        assert job.finish() == 0, job.describe()
        assert len(job.entries("world_formed")) == 1, job.describe()
        assert epochs(job.said()) == epochs(theirs.splitlines()) != []
