"""The master as a child process of the command that follows it: started, awaited, and gone at the end in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.jobdir import JobDir, MasterAddress
from elasticdl.common.startup import RUN_MODULE

MASTER_MODULE = "elasticdl.master.service.local_master"
START_TIMEOUT = 30.0  # seconds until the master has to listen
CLOSING_TIME = 5.0  # seconds that a master gets beyond the workers' grace
POLL = 0.05


class MasterProcess:
    """Leaving the context ends the master and everything in its process group."""

    def __init__(self, job: JobDir, stop_grace: float, impatient: Callable[[], bool]) -> None:
        """``impatient`` is asked during waits: True means that the user does not want to wait any longer."""
        self._job = job
        self._patience = stop_grace + CLOSING_TIME
        self._impatient = impatient
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(self._job.path)]
        command += ["--die_with_parent", str(os.getpid())]
        with self._job.master_log.open("ab") as log:
            # Its own session: a Ctrl-C in the terminal is for the command, which passes it on as a request.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        process = self._child()
        if process.poll() is None:
            process.terminate()
            self.wait(self._patience)
        self.kill()
        process.wait(CLOSING_TIME)

    def kill(self) -> None:
        """End the master and all in its process group now."""
        with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
            os.killpg(self._child().pid, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended by itself; given up early when somebody is impatient."""
        deadline = time.monotonic() + timeout
        while not self.has_ended():
            if time.monotonic() > deadline or self._impatient():
                return False
            time.sleep(POLL)
        return True

    def has_ended(self) -> bool:
        return self._child().poll() is not None

    def wait_until_up(self) -> MasterAddress | None:
        """Wait until the master listens; None if the job has ended already, or nobody wants to wait.

        Raises:
            UserError: it refused to start because of the user's mistake, as with a port that is taken.
            JobFailedError: it did not come up.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while (address := self._job.read_master()) is None:
            if self._job.status.exists() or self._impatient():
                return None
            if self.has_ended():
                self._raise_early_end()
            if time.monotonic() > deadline:
                raise JobFailedError(
                    f"the master was not up after {START_TIMEOUT:.0f} s; its log: {self._job.master_log}"
                )
            time.sleep(POLL)
        return address

    def _raise_early_end(self) -> None:
        code = self._child().returncode
        if code == 2:
            lines = self.log_tail(1)
            raise UserError(lines.removeprefix("elasticdl: ") or "the master refused to start")
        if not self._job.status.exists():
            raise JobFailedError(self.explain_end())

    def explain_end(self) -> str:
        """How a master ended that has not said how the job did, with the end of its log."""
        code = self._child().poll()
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return f"the master {how} before the job had ended; the end of {self._job.master_log}:\n{self.log_tail(20)}"

    def log_tail(self, lines: int) -> str:
        return "\n".join(self._job.master_log.read_text(errors="replace").strip().splitlines()[-lines:])

    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "used outside its context"
        return self._process
