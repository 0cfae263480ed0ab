"""What becomes of the workers when a master ends, in whatever way."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from elasticdl.common.credentials import Token
from elasticdl.common.errors import ReplacedError
from elasticdl.job.jobdir import JobDir
from elasticdl.job.spec import JobSpec
from elasticdl.master.core import events as e
from elasticdl.master.core.values import Phase
from elasticdl.master.shell.calls import Server, TokenAccess
from elasticdl.master.shell.loop import NoStore
from elasticdl.master.shell.observers import Observer, Observers
from elasticdl.master.shell.serve import Master, RelievedError, logging_to


class NoPlace:
    """It writes down what is asked of it; ``finding``, ``launching`` and ``closing`` are called then."""

    def __init__(self, report=None, finding=lambda: None):
        self.report, self.finding, self.launching, self.closing = report, finding, lambda: None, lambda: None
        self.calls, self.launched = [], []

    async def find(self, remembered):
        self.finding()
        return ()

    async def launch(self, worker_id, away_from=()):
        self.calls.append("launch")
        self.launched.append(worker_id)
        self.launching()

    def terminate(self, worker_id): ...

    def kill(self, worker_id):
        if self.report:
            self.report(e.WorkerExited(worker_id, e.ExitCause.KILLED, -9))

    async def close(self, *, keep=False):
        self.calls.append("keep" if keep else "close")
        if not keep:
            self.closing()


def mistake():
    raise ZeroDivisionError("a mistake")


class Ears(Observer):
    """What they heard; ``broken``: they raise."""

    def __init__(self, *, broken=False):
        self.heard, self.closed, self.broken = [], False, broken

    def recorded(self, event, fields):
        if self.broken:
            mistake()
        self.heard.append(event)

    def close(self):
        self.closed = True


class Taken(NoStore):
    """Another master writes there after the first save."""

    saved = 0

    async def save(self, snapshot):
        self.saved += 1
        if self.saved > 1:
            raise ReplacedError("another master has taken over")


class Run:
    """A master that is told to stop as soon as it serves; ``broken``: its launcher raises then; ``leaves``: when it is told to."""

    def __init__(self, folder, *, broken=False, leaves=""):
        self.ears, self.launcher, self._broken = Ears(), NoPlace(), broken
        if broken:
            self.launcher.launching = mistake
        self._leaves, self._store = leaves, Taken() if leaves == "when it can't save" else NoStore()
        self.job_dir = JobDir(folder / "digits")
        self.job_dir.path.mkdir(parents=True)

    def to_the_end(self):
        return asyncio.run(asyncio.wait_for(self._serve(), 60))

    async def _serve(self):
        server = Server("127.0.0.1", TokenAccess(Token("t")))
        server.bind(0)
        spec = JobSpec.model_validate({"num_workers": "1", "command": ("true",)})
        master = Master(spec, self.job_dir, server, self._store, self._make_launcher)
        master.observe(self.ears)
        match self._leaves:
            case "at once":
                master.leave("it has taken over")
            case "while it serves":
                self.launcher.finding = lambda: master.leave("it has taken over")
            case _ if not self._broken:
                master.post(e.StopRequested("enough"))
        return await master.run()

    def _make_launcher(self, report, limits):
        self.launcher.report = report
        return self.launcher


def test_a_decided_end_is_told_and_then_takes_the_workers_along(tmp_path):
    run, seen = Run(tmp_path), []
    status = run.job_dir.status
    run.launcher.closing = lambda: seen.append((json.loads(status.read_text())["phase"], run.ears.heard[-1]))
    assert run.to_the_end().phase is Phase.STOPPED
    assert seen == [("stopped", "job_finished")], "before the places are closed"
    assert run.launcher.calls[-2:] == ["close", "keep"]
    assert (run.ears.heard[0], run.ears.heard[-1], run.ears.closed) == ("job_started", "job_finished", True)


def test_a_master_that_breaks_leaves_the_workers_to_the_next(tmp_path):
    run = Run(tmp_path, broken=True)
    with pytest.raises(ZeroDivisionError):
        run.to_the_end()
    assert (run.launcher.calls, run.ears.closed) == (["launch", "keep"], True)


@pytest.mark.parametrize("when", ["at once", "while it serves", "when it can't save"])
def test_a_master_that_leaves_does_not_end_the_workers(tmp_path, when):
    run = Run(tmp_path, leaves=when)
    with pytest.raises(RelievedError, match=r"^leaving the job to another master: it has taken over$"):
        run.to_the_end()
    assert set(run.launcher.calls) == (set() if when == "at once" else {"keep"})
    assert not run.job_dir.status.exists()


def test_an_observer_that_raises_takes_nothing_from_the_others_and_is_complained_of_once(caplog):
    both = Observers([Ears(broken=True), other := Ears()])
    for event in ("stop_requested", "phase"):
        both.recorded(event, {})
    assert other.heard == ["stop_requested", "phase"]
    assert [r.message for r in caplog.records] == ["Ears has raised"]


def test_a_full_disk_under_the_masters_log_is_told_once_and_stops_nothing(capfd):
    told = []
    with logging_to(Path("/dev/full"), JobSpec(job_name="one"), told.append):
        for _ in range(3):
            logging.getLogger("elasticdl.master").error("what the master has to say")
    (line,) = told
    assert line.startswith("/dev/full can't be written: No space left on device; the job goes on")
    assert capfd.readouterr() == ("", "")
