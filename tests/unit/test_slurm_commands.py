"""How Slurm's programs are called and their answers read; they are scripts here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.places.base import PlaceState
from elasticdl.places.slurm import UnknownJobError, ask, number_of, run, sbatch, state_of


@pytest.fixture
def squeue(tmp_path, monkeypatch) -> Path:
    """The program, which does nothing yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "squeue"
    program.touch(0o755)
    return program


@pytest.fixture(params=["run", "ask"])
def call(request):
    return run if request.param == "run" else lambda *words, **given: asyncio.run(ask(*words, **given))


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
def test_what_slurm_refuses_is_told_from_what_it_can_not_do_now(squeue, call, said, kind, told):
    squeue.write_text(f"#!/bin/sh\nprintf '{said}\\n' >&2; exit 1")
    with pytest.raises(kind, match=f"^{told}") as raised:
        call("squeue")
    assert raised.type is kind


def test_a_machine_without_slurm_is_the_users_mistake(call):
    with pytest.raises(UserError, match=r"^can't run no-squeue: No such file or directory; is this a machine of a"):
        call("no-squeue")


def test_a_program_that_hangs_is_not_waited_for(squeue, call):
    squeue.write_text("#!/bin/sh\nexec sleep 600")
    with pytest.raises(UnreachableError, match=r"^Slurm does not answer: squeue took more than 0\.1 s$"):
        call("squeue", within=0.1)


def test_what_the_user_asks_for_comes_last():
    words = sbatch("name", "out", ["--partition=gpu"], "run")
    assert words[-2:] == ["--partition=gpu", "--wrap=run"]
    assert number_of("12;cluster\n") == "12"


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ("REQUEUED", PlaceState.WAITING),
        ("SUSPENDED", PlaceState.ENDING),
        ("COMPLETING", PlaceState.ENDING),
        ("", PlaceState.LOST),
    ],
)
def test_where_a_batch_job_is_in_its_life(state, where):
    assert state_of(state) is where
