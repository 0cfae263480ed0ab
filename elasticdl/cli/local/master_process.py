"""The master as a child process of the command that follows it: started, awaited, and gone at the end in any case."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.process_group import ProcessGroup
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.jobdir import JobDir, MasterAddress

MASTER_MODULE = "elasticdl.master.shell.local_master"
START_TIMEOUT = 30.0  # seconds until the master has to listen
CLOSING_TIME = 5.0  # seconds that a master gets beyond the workers' grace
POLL = 0.05


@contextlib.contextmanager
def started(
    job: JobDir, stop_grace: float, impatient: Callable[[], bool], *, held: bool, stdout_apart: bool
) -> Iterator[MasterProcess]:
    """Leaving the context ends the master and everything in its process group.

    ``held``: it gets ready, and begins when it is released. ``stdout_apart``: what workers print on stdout has a file of its own.
    ``impatient`` is asked during waits: True means that the user does not want to wait any longer.
    """
    temporary = _temporary_folder()
    command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path), "--die_with_parent", str(os.getpid())]
    command += ["--temporary", temporary, *(["--held"] if held else []), *(["--stdout_apart"] if stdout_apart else [])]
    try:
        with job.master_log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if held else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_terminal_size(), **os.environ, "TMPDIR": temporary},
                start_new_session=True,  # a Ctrl-C in the terminal is for the command, which passes it on as a request
            )
        master = MasterProcess(job, ProcessGroup(process.pid, process.wait), process.stdin, impatient)
        try:
            yield master
        finally:
            _end(master, stop_grace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _terminal_size() -> dict[str, str]:
    """For programs that fit what they print to the terminal, which workers do not have; tqdm has a variable of its own."""
    columns, lines = os.get_terminal_size(2) if os.isatty(2) else (0, 0)
    return {"COLUMNS": str(columns), "LINES": str(lines), "TQDM_NCOLS": str(columns - 1)} if columns else {}


def _temporary_folder() -> str:
    """For the master and its workers: of a process that is killed it is removed with what was in it.

    Raises:
        UserError: there is no place for one.
    """
    try:
        return tempfile.mkdtemp(prefix="elasticdl-")
    except OSError as error:
        raise UserError(f"can't make a temporary folder: {error.strerror or error}; TMPDIR names the place") from None


def _end(master: MasterProcess, stop_grace: float) -> None:
    if not master.has_ended():
        master.group.signal(signal.SIGTERM)
        master.wait(stop_grace + CLOSING_TIME)
    master.group.end()
    if master.stdin is not None:
        master.stdin.close()


@dataclass(frozen=True, slots=True)
class MasterProcess:
    job: JobDir
    group: ProcessGroup
    stdin: IO[bytes] | None  # of one that is held
    impatient: Callable[[], bool]

    def release(self) -> None:
        """Let a master begin that was held."""
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which is noticed later
            self.stdin.write(b"\n")
            self.stdin.flush()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended by itself; given up early when somebody is impatient."""
        deadline = time.monotonic() + timeout
        while not self.has_ended():
            if time.monotonic() > deadline or self.impatient():
                return False
            time.sleep(POLL)
        return True

    def has_ended(self) -> bool:
        return self.group.code() is not None

    def wait_until_up(self) -> MasterAddress | None:
        """Wait until the master listens; None if the job has ended already, or nobody wants to wait.

        Raises:
            UserError: it refused to start because of the user's mistake, as with a port that is taken.
            JobFailedError: it did not come up.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while (address := self.job.read_master()) is None:
            if self.job.status.exists() or self.impatient():
                return None
            if self.has_ended():
                self._raise_early_end()
            if time.monotonic() > deadline:
                raise JobFailedError(
                    f"the master was not up after {START_TIMEOUT:.0f} s; its log: {self.job.master_log}"
                )
            time.sleep(POLL)
        return address

    def _raise_early_end(self) -> None:
        if self.group.code() == 2:
            said = self._log_tail(1).removeprefix("elasticdl: ")
            raise UserError(said or "the master refused to start")
        if not self.job.status.exists():
            raise JobFailedError(self.explain_end())

    def explain_end(self) -> str:
        """How a master ended that has not said how the job did, with the end of its log."""
        code = self.group.code()
        killed = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else ""
        how = killed or f"ended with exit code {code}"
        return f"the master {how} before the job had ended; the end of {self.job.master_log}:\n{self._log_tail(20)}"

    def _log_tail(self, lines: int) -> str:
        return "\n".join(self.job.master_log.read_text(errors="replace").strip().splitlines()[-lines:])
