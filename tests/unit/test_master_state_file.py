"""`elasticdl.master.shell.slurm_master`: what one master of a batch system leaves to the next."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from elasticdl.common.channel import address_of
from elasticdl.common.errors import ReplacedError, UnreachableError, UserError
from elasticdl.job.jobdir import JobDir
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.worker_record import JobSnapshot, Snapshot
from elasticdl.master.shell.slurm_master import FileState


def snapshot(next_id: int) -> Snapshot:
    return Snapshot(JobSnapshot(WorkerRange(minimum=1, maximum=4), next_id), started=1.0)


@pytest.fixture
def job(tmp_path) -> JobDir:
    return JobDir(tmp_path)


def test_the_next_master_has_what_the_last_one_saved_and_the_journal_of_that_moment_and_the_last_writes_no_more(job):
    async def story() -> None:
        first, second = FileState(job, 0), FileState(job, 1)
        assert await first.load() is None
        job.journal.write_text("one\ntwo\n")
        await first.save(saved := replace(snapshot(1), journal_bytes=8))
        job.journal.write_text("one\ntwo\nthree\nfo")
        assert (await second.load(), job.journal.read_text()) == (saved, "one\ntwo\n")
        with pytest.raises(ReplacedError):
            await first.save(snapshot(2))
        await second.save(snapshot(3))
        assert await FileState(job, 1).load() == snapshot(3)

    asyncio.run(story())


def test_what_was_cut_off_is_not_in_the_journal(job):
    """A line, and what a master writes that was cut off itself."""
    job.journal.write_text("one\ntw")
    with job.journal.open("a") as cut_off:
        assert asyncio.run(FileState(job, 1).load()) is None
        cut_off.write("two\n")
    assert job.journal.read_text() == "one\n"


def test_a_file_that_is_no_snapshot_is_the_users_to_mend_and_a_folder_that_takes_nothing_now_may_do_so_later(job):
    job.state.write_text('{"format": 77')
    with pytest.raises(UserError, match=r"an earlier master has left in .* can't be read"):
        asyncio.run(FileState(job, 0).load())
    job.state.unlink()
    job.state.mkdir()
    with pytest.raises(UnreachableError, match=r"^can't take the job over in .*: Is a directory$"):
        asyncio.run(FileState(job, 0).load())


def test_a_masters_address_may_stand_in_a_file(tmp_path):
    where = tmp_path / "master.json"
    assert address_of("10.0.0.1:80") == "10.0.0.1:80"
    with pytest.raises(UnreachableError, match=r"no master is up: .*master\.json: No such file"):
        address_of(f"file:{where}")
    where.write_text('{"address": "10.0.0.2:81", "pid": 1}')
    assert address_of(f"file:{where}") == "10.0.0.2:81"
    where.write_text("[")
    with pytest.raises(UnreachableError, match="holds no address"):
        address_of(f"file:{where}")
