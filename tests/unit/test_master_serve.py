"""What becomes of the workers when a master ends, in whatever way."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from elasticdl.common.credentials import Token
from elasticdl.common.errors import UserError
from elasticdl.common.jobdir import JobDir
from elasticdl.common.spec import JobSpec
from elasticdl.master.core import events as e
from elasticdl.master.core.instructions import Phase
from elasticdl.master.observers.observer import Observer
from elasticdl.master.service.access import TokenAccess
from elasticdl.master.service.saver import Nowhere
from elasticdl.master.service.serve import Platform, serve
from elasticdl.master.service.servicer import Server


class NoPlace:
    """A launcher with no place for anybody."""

    report = None

    def __init__(self):
        self.calls = []

    async def find(self):
        return ()

    async def launch(self, worker_id):
        self.calls.append("launch")

    def terminate(self, worker_id):
        pass

    def kill(self, worker_id):
        self.report(e.WorkerExited(worker_id, e.ExitCause.KILLED, -9))

    async def close(self):
        self.calls.append("close")

    async def detach(self):
        self.calls.append("detach")


class Ears(Observer):
    def __init__(self, broken):
        self.heard = []
        self.closed = False
        self._broken = broken

    def observe(self, event):
        if self._broken and isinstance(event, e.StopRequested):
            raise ZeroDivisionError("a bug")

    def recorded(self, event, fields):
        self.heard.append(event)

    def close(self):
        self.closed = True


class Run:
    """A master that is told to stop as soon as it serves; ``broken``: it does not survive that."""

    def __init__(self, folder, *, broken=False, **options):
        self.ears = Ears(broken)
        self.launcher = NoPlace()
        self._spec = JobSpec.model_validate({"num_workers": "1", "command": ("true",), **options})
        self._job_dir = JobDir(folder / "digits")
        self._job_dir.path.mkdir()

    def to_the_end(self):
        return asyncio.run(asyncio.wait_for(self._serve(), 60))

    async def _serve(self):
        server = Server("127.0.0.1", TokenAccess(Token("t")))
        server.bind(0)
        site = Platform(server, self._make_launcher, Nowhere(), self._attend, lambda status: [self.ears])
        return await serve(self._spec, self._job_dir, site)

    def _make_launcher(self, report):
        self.launcher.report = report
        return self.launcher

    @asynccontextmanager
    async def _attend(self, post):
        post(e.StopRequested("enough"))
        yield


def test_a_decided_end_takes_the_workers_along_and_is_told(tmp_path):
    run = Run(tmp_path, broken=False)
    assert run.to_the_end().phase is Phase.STOPPED
    assert run.launcher.calls[-2:] == ["close", "detach"]
    assert (run.ears.heard[0], run.ears.heard[-1]) == ("job_started", "job_finished")
    assert run.ears.closed


def test_a_master_that_breaks_leaves_the_workers_to_the_next(tmp_path):
    run = Run(tmp_path, broken=True)
    with pytest.raises(ZeroDivisionError):
        run.to_the_end()
    assert run.launcher.calls[-1] == "detach"
    assert "close" not in run.launcher.calls
    assert run.ears.closed


def test_a_folder_that_can_not_be_written_is_told_before_anybody_is_launched(tmp_path):
    (tmp_path / "file").touch()
    run = Run(tmp_path, output=str(tmp_path / "file" / "out"))
    with pytest.raises(UserError, match=r"^--output .*/file/out must be a folder"):
        run.to_the_end()
    assert run.launcher.calls == []
