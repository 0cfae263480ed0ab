"""What keeps a master running in its batch job on Slurm, and how Slurm is asked; the master and Slurm's programs are scripts here."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import pytest
from cli_kit import new_job, scene_in

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.journal import read_journal
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import ExitCause
from elasticdl.master.shell import slurm_keeper, slurm_master
from elasticdl.master.shell.serve import RelievedError
from elasticdl.master.shell.slurm_keeper import EXIT_AGAIN, EXIT_LEFT, MOST_CRASHES, Keeper
from elasticdl.places.base import Place, PlaceLost, PlaceState
from elasticdl.places.slurm import SlurmProvider, UnknownJobError, ask, number_of, run, sbatch, state_of

WORKERS = "scancel --quiet --me --name=elasticdl-mine-7-worker"
MASTER = """
import os, signal, sys, time
from pathlib import Path
job = Path(sys.argv[1])
(job / "starts").open("a").write("x")
start = len((job / "starts").read_text())
"""
KILLED = "os.kill(os.getpid(), 9)"
ENDS = "(job / 'status.json').write_text('{}')"
TOLD = f"os.kill(os.getppid(), {signal.SIGTERM})"


class Kept:
    """A job and its keeper; what is asked of Slurm's programs the scene says."""

    def __init__(self, scene):
        self.job, self.program, self.calls = new_job("mine"), scene.program, scene.asked
        self.program("scancel")

    def keep(self, *master, delay=0.0, command=None):
        """``master``: what each master does, in Python; ``start`` says how many there were with it."""
        command = command or [sys.executable, "-I", "-S", "-c", MASTER + "\n".join(master), str(self.job.path)]

        async def run():
            backoff = Backoff(first=delay, longest=delay)
            return await asyncio.wait_for(Keeper(self.job, command, "7", 0, backoff).run(), 60)

        return asyncio.run(run())

    @property
    def starts(self):
        return len((self.job.path / "starts").read_text())

    def status(self):
        return json.loads(self.job.status.read_text())


@pytest.fixture
def bench(tmp_path, monkeypatch):
    with scene_in(tmp_path, monkeypatch) as scene:
        yield Kept(scene)


def test_a_job_whose_masters_are_killed_again_and_again_has_failed(bench):
    bench.job.journal.write_text('{"time": 1.0, "event": "resumed", "step": 5}\n{"time": 2.0, "ev')
    assert bench.keep(KILLED) == 1
    status = bench.status()
    assert (bench.starts, status["phase"], status["step"]) == (MOST_CRASHES, "failed", "5")
    assert status["reason"].startswith(f"its master was killed by SIGKILL, the {MOST_CRASHES}th in a row: if memory")
    assert bench.calls() == [WORKERS]
    resumed, last = read_journal(bench.job.journal)  # the master's last line was cut off
    assert resumed["event"] == "resumed"
    assert (last["event"], last["phase"], last["reason"]) == ("job_finished", "failed", status["reason"])


def test_a_master_that_is_killed_is_followed_by_another_and_crashes_of_those_that_ran_long_do_not_add_up(
    bench, monkeypatch
):
    monkeypatch.setattr(slurm_keeper, "SOON_SECONDS", -1.0)
    bench.job.master.write_text("of the one that is killed")
    left = "assert not (job / 'master.json').exists()"
    assert bench.keep(f"if start < {MOST_CRASHES + 2}: {KILLED}", left, ENDS, "sys.exit(1)") == 1
    assert (bench.starts, bench.calls()) == (MOST_CRASHES + 2, [])


@pytest.mark.parametrize("before", [True, False])
def test_where_slurm_has_started_the_job_again_no_other_master_takes_it_back(bench, before):
    """Its node was cut off: the next one runs elsewhere, in the same batch job, and the master here has died."""
    bench.job.master.write_text("of the next one")
    bench.job.holder.write_text("1" if before else "0")
    bench.job.path.joinpath("starts").touch()
    assert bench.keep("(job / 'state.holder').write_text('1')", KILLED) == EXIT_LEFT
    assert (bench.starts, bench.calls(), bench.job.status.exists()) == (0 if before else 1, [], False)
    assert bench.job.master.read_text() == "of the next one"


def test_a_master_that_can_not_be_started_is_one_that_broke(bench):
    """As when memory is short: who keeps the masters says so, and does not end without a word."""
    bench.job.master_log.write_text("can't start a master\n")
    assert bench.keep(command=[str(bench.job.path / "nothing")]) == 1
    assert bench.status()["reason"] == f"its master broke, the {MOST_CRASHES}th in a row: can't start a master"
    assert bench.calls() == [WORKERS]


def test_the_users_mistake_is_told_and_no_other_master_is_started_also_where_the_disk_is_full(bench, caplog):
    bench.job.master_log.write_text("elasticdl: port 80 is taken\n")
    assert bench.keep("sys.exit(2)") == 1
    assert (bench.starts, bench.calls()) == (1, [WORKERS])
    assert bench.status()["reason"] == "its master ended with exit code 2: port 80 is taken"
    bench.job.status.unlink()
    bench.job.journal.unlink()
    bench.job.journal.mkdir()
    assert (bench.keep("sys.exit(2)"), bench.calls()) == (1, [WORKERS])
    assert "can't write that to" in caplog.text


def test_the_workers_of_a_job_that_has_ended_are_not_left_and_those_of_a_master_that_leaves_are(bench):
    assert bench.keep(f"sys.exit({EXIT_LEFT})") == EXIT_LEFT
    assert (bench.calls(), bench.job.status.exists()) == ([], False), "its workers are the next one's"
    assert bench.keep(ENDS, KILLED) == 128 + signal.SIGKILL
    assert (bench.starts, bench.calls(), bench.job.status.read_text()) == (2, [WORKERS], "{}")


@pytest.mark.parametrize(
    ("state", "code", "asked"),
    [
        ("RUNNING", EXIT_LEFT, "scontrol requeue 7"),
        ("CANCELLED Restarts=0", 130, WORKERS),
        ("COMPLETING Restarts=1", EXIT_LEFT, ""),
        ("; echo busy >&2; exit 1", EXIT_LEFT, ""),  # it does not answer
    ],
)
def test_slurm_may_want_an_end_while_no_master_runs_or_has_one_told_to_leave_or_to_stop_the_job(
    bench, state, code, asked
):
    bench.program(f"scontrol [ $1 = requeue ] || echo JobId=7 JobState={state}")
    assert bench.keep(TOLD, KILLED, delay=60) == code
    assert bench.calls()[1:] == ([asked] if asked else [])
    assert bench.job.status.exists() == (code == 130)
    bench.job.status.unlink(missing_ok=True)
    leaves = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))"
    stops = f"signal.signal(signal.SIGINT, lambda *_: ({ENDS}, sys.exit(130)))"
    assert bench.keep(leaves, stops, TOLD, "time.sleep(60)") == code
    assert (bench.job.status.exists(), WORKERS in bench.calls()) == (code == 130, False)


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError, 2), (RelievedError, EXIT_LEFT), (UnreachableError, EXIT_AGAIN), (ZeroDivisionError, EXIT_AGAIN)],
)
def test_a_master_says_by_its_exit_code_whether_another_may_do_better(bench, monkeypatch, error, code):
    async def run(*given):
        raise error("why")

    bench.job.spec.write_text(JobSpec(job_name="mine", command=("true",)).to_json())
    monkeypatch.setattr(slurm_master, "run", run)
    assert slurm_master.main(["--job_dir", str(bench.job.path)]) == code


# ---- how Slurm's programs are called, and their answers read ----


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes one of Slurm's: its name, and what it does."""
    with scene_in(tmp_path, monkeypatch) as scene:
        yield scene.program


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        ("slurm_load_jobs error: Invalid job id specified", UnknownJobError, "Slurm refuses squeue: slurm_load_jobs"),
        ("squeue: error: Unable to contact slurm controller", UnreachableError, "Slurm does not answer: squeue: Unab"),
        ("submission failed: Requested time limit is invalid (exceeds some limit)", UserError, ""),
        ("AssocMaxSubmitJobLimit\\nsubmission failed: Job violates accounting/QOS policy", UnreachableError, ""),
        ("", UserError, "Slurm refuses squeue: $"),
    ],
)
def test_what_slurm_refuses_is_told_from_what_it_can_not_do_now(program, said, kind, told):
    program(f"squeue printf '{said}\\n' >&2; exit 1")
    with pytest.raises(kind, match=f"^{told}") as raised:
        run("squeue")
    assert raised.type is kind


def test_a_program_that_hangs_is_not_waited_for(program):
    program("squeue exec /bin/sleep 600")
    with pytest.raises(UnreachableError, match=r"^Slurm does not answer: squeue took more than 0\.1 s$"):
        asyncio.run(ask("squeue", within=0.1))


def test_what_the_user_asks_for_comes_last():
    words = sbatch("name", "out", ["--partition=gpu"], "run")
    assert words[-2:] == ["--partition=gpu", "--wrap=run"]
    assert number_of("12;cluster\n") == "12"


def test_the_processes_of_a_worker_share_its_processors(program, monkeypatch):
    program('sbatch for last; do :; done\nexec /bin/sh -c "${last#--wrap=}"')
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "5")
    told = ("/bin/sh", "-c", "echo $OMP_NUM_THREADS")
    for given, processes, threads in [(None, 1, "5"), (None, 2, "3"), (None, 8, "1"), ("7", 2, "7")]:
        monkeypatch.setenv("OMP_NUM_THREADS", given) if given else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert asyncio.run(SlurmProvider("job", told, "out", (), processes).ask(frozenset())) == threads


def test_what_slurm_says_of_its_queue_is_read_and_fails_no_job(program):
    lines = [
        "0|REQUEUED||None",
        "1|RUNNING|n1|None",
        "2|SUSPENDED|n1|None",
        "3|TIMEOUT|n1|None",
        "4|PENDING||(Priority)",
    ]
    program("squeue echo 'squeue: a warning'\n" + "".join(f"echo '{each}'\n" for each in lines))
    provider = SlurmProvider("job", ("agent",), "out")
    assert asyncio.run(provider.list()) == {
        "0": Place("0", reason="Slurm has not looked at it yet"),
        "1": Place("1", "n1", PlaceState.READY),
        "2": Place("2", "n1", PlaceState.ENDING, "Slurm: suspended"),
        "3": PlaceLost("3", ExitCause.EVICTED, -9, "its time limit is over"),
        "4": Place("4", reason="Slurm has no place for it yet: Priority"),
    }
    assert state_of("") is PlaceState.LOST
    program("squeue echo something new >&2; exit 1")
    with pytest.raises(UnreachableError, match="something new"):
        asyncio.run(provider.list())
