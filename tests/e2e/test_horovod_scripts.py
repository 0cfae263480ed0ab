"""Scripts written for Horovod's own elastic mode, unchanged, under our master while workers come and go."""

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from running_job import RunningJob, run_cli, start

SCRIPTS = Path(__file__).parent / "scripts"
BATCHES = 500  # enough for newcomers to get ready while a slow training goes on, also on a busy machine


@dataclass(frozen=True)
class Commit:
    batches: int
    size: int


def log_of(job: RunningJob, worker: int) -> str:
    path = job.job.worker_log(worker)
    return path.read_text() if path.exists() else ""


def commits_of(job: RunningJob, worker: int) -> list[Commit]:
    return [Commit(int(b), int(s)) for b, s in re.findall(r"^commit (\d+) size (\d+)", log_of(job, worker), re.M)]


def wait_for_commits(job: RunningJob, world: dict, count: int = 3) -> None:
    """Until every member of the world has committed some more times within it."""
    size = len(world["members"])
    before = {worker: len(commits_of(job, worker)) for worker in world["members"]}

    def committed() -> bool:
        later = {worker: commits_of(job, worker)[n:] for worker, n in before.items()}
        return all(sum(commit.size == size for commit in commits) >= count for commits in later.values())

    job.wait_for(f"commits of all of {world['members']}", committed)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_script_of_horovods_goes_on_while_workers_come_and_go(tmp_path, framework):
    slow = tmp_path / "slow"
    slow.touch()
    script = str(SCRIPTS / f"horovod_{framework}.py")
    arguments = ["run", "--num_workers", "2", "--", sys.executable, script]
    with start(tmp_path, *arguments, TEST_BATCHES=str(BATCHES), TEST_SLOW_WHILE=str(slow)) as job:
        world = job.wait_for_world(size=2)
        wait_for_commits(job, world)
        assert run_cli(tmp_path, "scale", "job", "2-3").returncode == 0
        grown = job.wait_for_world(size=3, after=world["world"])
        assert set(world["members"]) < set(grown["members"])
        wait_for_commits(job, grown)
        killed, terminated = grown["members"][:2]
        job.signal(killed, signal.SIGKILL)  # rank 0, whose state the others would take
        shrunk = job.wait_for_world(size=2, after=grown["world"])
        replaced = job.wait_for_world(size=3, after=shrunk["world"])
        wait_for_commits(job, replaced)
        job.signal(terminated, signal.SIGTERM)
        again = job.wait_for_world(size=2, after=replaced["world"])
        whole = job.wait_for_world(size=3, after=again["world"])
        wait_for_commits(job, whole)
        slow.unlink()
        assert job.finish() == 0, job.describe()

        left = {entry["worker"]: entry for entry in job.entries("worker_left")}
        assert left[terminated]["cause"] == "drained"
        assert left[terminated]["code"] == 0
        for worker in {w for entry in job.entries("world_formed") for w in entry["members"]}:
            batches = [commit.batches for commit in commits_of(job, worker)]
            assert batches == sorted(batches), f"worker {worker} went back"
        logs = "".join(log_of(job, worker) for worker in left)
        results = re.findall(r"^done (\d+) rank \d+ weight (\S+)", logs, re.M)
        assert len(results) >= 2
        assert len(set(results)) == 1, "all hold the same model in the end"
        for newcomer in set(replaced["members"]) - set(world["members"]):
            assert commits_of(job, newcomer)[0].batches > 4, "it began where the others were"
        assert job.entries("job_finished")[0]["steps"] >= BATCHES // 4
