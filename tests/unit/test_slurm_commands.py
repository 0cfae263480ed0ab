"""How Slurm's programs are called and their answers read; they are scripts here."""

from __future__ import annotations

import asyncio

import pytest
from cli_kit import scene_in

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import Place, PlaceLost, PlaceState
from elasticdl.places.slurm import SlurmProvider, UnknownJobError, ask, number_of, run, sbatch, state_of


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
