"""A worker's process, where this machine has no more to give."""

import asyncio
import errno

import psutil
import pytest

from elasticdl.common.process_group import ProcessGroup
from elasticdl.places.worker_output import InFile
from elasticdl.places.worker_process import Spawner, WorkerRun


def test_a_worker_that_can_not_be_waited_for_does_not_run_on_in_its_place(tmp_path, monkeypatch):
    """Its place would be given to the next one, on the same GPU."""

    async def no_more(self, seconds=None):
        raise OSError(errno.EMFILE, "Too many open files")

    async def whole():
        pids = []
        run = WorkerRun(0, InFile(tmp_path / "log"))

        async def spawner():
            return Spawner(["sleep", "60"])

        monkeypatch.setattr(ProcessGroup, "has_ended", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            await run.to_its_end(spawner, {"PATH": "/usr/bin:/bin"}, pids.append)
        return pids

    (pid,) = asyncio.run(whole())
    assert not psutil.pid_exists(pid)
