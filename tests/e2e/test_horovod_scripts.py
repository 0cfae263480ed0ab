"""Scripts written for Horovod's own elastic mode, unchanged, under our master while workers come and go; and what Horovod is built
anew for (`scripts/build_horovod.py`; freezes are in `tests/contract/test_collectives.py`)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import DEADLINE, start

from elasticdl.elastic.collectives.horovod import horovod_host
from elasticdl.elastic.core.protocol import ALONE

COMMITS = 3  # of each member, after 2 batches each, before the next disturbance


def commits_of(job, worker):
    """Of each commit the batches before it, and the size of the world."""
    path = job.job.worker_log(worker)
    told = re.findall(r"^commit (\d+) size (\d+)", path.read_text() if path.exists() else "", re.M)
    return [(int(batches), int(size)) for batches, size in told]


def wait_for_commits(job, world):
    """Until every member of the world has committed some more times within it."""
    size = len(world["members"])
    before = {worker: len(commits_of(job, worker)) for worker in world["members"]}

    def committed():
        later = [commits_of(job, worker)[made:] for worker, made in before.items()]
        return all(sum(found == size for _, found in commits) >= COMMITS for commits in later)

    job.wait_for(f"commits of all of {world['members']}", committed)


@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_a_script_of_horovods_goes_on_while_workers_come_and_go(tmp_path, framework):
    go_on = tmp_path / "go_on"
    go_on.touch()
    script = Path(__file__).parent / "scripts" / f"horovod_{framework}.py"
    # TensorFlow holds Python's lock while it traces: on a busy machine for longer than a heartbeat may take.
    arguments = ["run", "--num_workers", "2-3", "--heartbeat_timeout", "20", "--", sys.executable, str(script)]
    with start(tmp_path, *arguments, TEST_GO_ON_WHILE=str(go_on)) as job:
        first = job.wait_for_world(size=3)
        wait_for_commits(job, first)
        killed, *survivors = first["members"]
        job.signal(killed, signal.SIGKILL)  # rank 0, whose state the others would take
        shrunk = job.wait_for_world_without(killed)
        assert set(survivors) <= set(shrunk["members"])
        grown = job.wait_for_world(size=3, after=shrunk["world"] - 1)
        (newcomer,) = set(grown["members"]) - set(survivors)
        assert grown["members"][-1] == newcomer
        wait_for_commits(job, grown)
        terminated, stayed = survivors
        job.signal(terminated, signal.SIGTERM)
        last = job.wait_for_world_without(terminated)
        assert {stayed, newcomer} <= set(last["members"])
        # Not for commits in that world: the one in place of who left is there at once.
        wait_for_commits(job, job.wait_for_world(size=3, after=last["world"] - 1))
        go_on.unlink()
        assert job.finish() == 0, job.describe()

        left = {entry["worker"]: entry for entry in job.entries("worker_left")}
        assert left[killed]["cause"] == "killed"
        assert (left[terminated]["cause"], left[terminated]["code"]) == ("drained", 0)
        for worker in (*first["members"], newcomer):
            commits = commits_of(job, worker)
            assert commits == sorted(commits, key=lambda each: each[0]), f"worker {worker} went back"
        assert commits_of(job, newcomer)[0][0] > 2 * COMMITS, "it began where the others were"
        results = re.findall(r"^done (\d+) rank \d+ weight (\S+)", "\n".join(job.said()), re.M)
        assert len(results) >= 2
        assert len(set(results)) == 1, "all hold the same model in the end"
        assert job.entries("job_finished")[0]["steps"] >= int(results[0][0]) // 2
        assert {(pause["worker"], pause["kind"]) for pause in job.entries("pause")} >= {
            *((worker, "failure") for worker in survivors),
            *((worker, "grow") for worker in survivors),
            *((worker, "shrink") for worker in last["members"]),
        }


def test_a_worker_on_a_host_whose_name_does_not_resolve_uses_the_interface_that_it_was_given():
    own_name = ["unshare", "--uts"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--uts"]
    command = 'echo nowhere.invalid > /proc/sys/kernel/hostname && exec "$0" -c "$1"'
    init = "import horovod.torch as hvd; hvd.init(); print(hvd.size())"
    values = {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    values |= {"HOSTNAME": horovod_host(ALONE), "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    environment = {**os.environ, **{f"HOROVOD_{name}": str(value) for name, value in values.items()}}
    if subprocess.run([*own_name, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody have a host name of their own")
    arguments = [*own_name, "sh", "-c", command, sys.executable, init]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
