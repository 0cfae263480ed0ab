"""A whole job on a real Slurm: each place a batch job, and the master one as well."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest
from running_job import ZOO, run_cli, start

from elasticdl.job.jobdir import MasterAddress, kept_states
from tests.waiting import wait_until

pytest_plugins = ["tests.slurm.fixtures"]
pytestmark = pytest.mark.slow

PLACES = ["--launcher", "slurm", "--slurm_master_args=--partition=high", "--slurm_args=--partition=low"]
ON_SLURM = [*PLACES, "--model_zoo", str(ZOO)]
TRAIN = [
    *("train", *ON_SLURM, "--model_def", "paced_mlp", "--model_params", f"sample_seconds={0.05 / 64}"),
    *("--global_batch_size", "64", "--num_epochs", "1000", "--num_workers", "1-3", "--collective", "torch"),
]
OF_TWO_PROCESSES = ["--processes_per_worker", "2", "--", "python", "examples/groups/fsdp2.py", "--samples", "660"]


def take(slurm, partition: str) -> str:
    """One processor, by somebody else's job; returns its number."""
    return slurm.run("sbatch", "--parsable", f"--partition={partition}", "--output=/dev/null", "--wrap=sleep 300")


def environment_of(slurm):
    return {name: slurm.environment[name] for name in ("PATH", "SLURM_CONF", "LD_LIBRARY_PATH")}


def test_a_worker_of_two_processes_is_replaced_when_one_of_them_is_killed(slurm, tmp_path):
    def losses(output):
        return [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+)$", output, re.MULTILINE)]

    environment = environment_of(slurm)
    alone = run_cli(tmp_path, "run", *PLACES, "--num_workers", "1", *OF_TWO_PROCESSES, env=environment)
    assert alone.returncode == 0, alone.stderr
    with start(tmp_path, "run", *PLACES, "--num_workers", "2", *OF_TWO_PROCESSES, name="job", **environment) as job:
        job.wait_for("an epoch", lambda: losses(job.output))
        psutil.Process(job.pid(1)).children()[-1].kill()
        assert job.finish() == 0, job.describe()
    ends = {left["worker"]: left["reason"] for left in job.entries("worker_left")}
    assert ends == {0: "finished", 1: "killed: SIGKILL", 2: "finished"}
    assert losses(job.output) == pytest.approx(losses(alone.stderr), rel=0.01)
    wait_until(lambda: not slurm.run("squeue", "--noheader"), lambda: slurm.run("squeue"))  # one may be completing


def test_a_job_grows_is_preempted_and_outlives_its_master(slurm, tmp_path):
    filler = take(slurm, "low")
    environment = environment_of(slurm)
    with start(tmp_path, *TRAIN, name="job", **environment) as job:
        world = job.wait_for_world(size=2)
        slurm.run("scancel", filler)
        world = job.wait_for_world(size=3, after=world["world"])

        urgent = take(slurm, "high")
        world = job.wait_for_world(size=2, after=world["world"])
        job.wait_for("the cause", lambda: job.entries("worker_left"))
        (left,) = job.entries("worker_left")
        assert (left["cause"], left["reason"]) == ("preempted", "preempted: preempted by a job of higher priority")
        slurm.run("scancel", urgent)
        world = job.wait_for_world(size=3, after=world["world"])

        job.wait_for_step(job.steps_recorded() + 20)  # by then that world is saved
        address = MasterAddress.read(job.job.master)
        os.kill(address.pid, signal.SIGKILL)
        job.wait_for("the next master", lambda: job.entries("master_restarted"))
        (second,) = job.entries("master_restarted")
        assert (second["world"], second["missing"]) == (world["world"], [])
        job.wait_for_step(job.steps_recorded() + 20)
        assert MasterAddress.read(job.job.master) != address

        slurm.run("scontrol", "requeue", (job.job.path / "batch").read_text())
        job.wait_for(
            "the third master", lambda: any(entry["time"] > second["time"] for entry in job.entries("master_restarted"))
        )
        third = job.entries("master_restarted")[-1]
        assert (third["world"], third["missing"]) == (world["world"], [])
        job.wait_for_step(job.steps_recorded() + 20)
        assert job.entries("world_formed")[-1] == world, "the workers went on"

        shown = run_cli(tmp_path, "status", "job", env=environment).stdout
        assert "3 workers" in shown
        assert "workers now 1-2" in run_cli(tmp_path, "scale", "job", "1-2", env=environment).stdout
        job.wait_for_world(size=2, after=world["world"])
        stopped = run_cli(tmp_path, "stop", "job", env=environment)
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert job.finish() == 1, "somebody else stopped it"
        assert kept_states(job.job.path), "the training is kept"
    steps = job.entries("steps")
    assert sum(entry["steps"] for entry in steps) == steps[-1]["step"], "each step once"
    wait_until(lambda: not slurm.run("squeue", "--noheader"), lambda: slurm.run("squeue"))  # one may be completing
