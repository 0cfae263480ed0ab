"""One command after another of a build, with a log; each is over within its time, and ends with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from elasticdl.common.process_group import tethered

_FETCHED_WITHIN_S = 1200.0
_DONE_WITHIN_S = 7200.0


class Unavailable(Exception):
    """This machine cannot have the programs; the message says in one line what is missing."""


class BuildError(Exception):
    """The programs should have been built and were not; the message says where to look."""


@contextlib.contextmanager
def or_unavailable(what: str) -> Iterator[None]:
    """What the system refuses (a folder that can't be written, a full disk, a program that does not start), and a program
    that does not answer in its time, is a thing that this machine lacks.

    Raises:
        Unavailable: ``what`` could not be done.
    """
    try:
        yield
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from error


class Steps:
    """Commands whose output goes to ``log``; ``say`` is told in a line what is being done."""

    def __init__(self, log: Path, say: Callable[[str], None]) -> None:
        self.say = say
        self._log = log
        log.write_text("")

    def fetch(
        self, source: str, command: list[str], folder: Path, env: Mapping[str, str], within_s: float = _FETCHED_WITHIN_S
    ) -> None:
        """Run a command that gets something from ``source``.

        Raises:
            Unavailable: it failed, or took longer than ``within_s``: the network is to blame, not the build.
        """
        if failure := self._run(command, folder, env, within_s):
            raise Unavailable(f"{source}: {failure} (log: {self._log})")

    def run(self, command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        """
        Raises:
            BuildError: it failed, or took hours.
        """
        if failure := self._run(command, folder, env, _DONE_WITHIN_S):
            raise BuildError(f"{Path(command[0]).name} {command[1]}: {failure} (log: {self._log})")

    def _run(self, command: list[str], folder: Path, env: Mapping[str, str] | None, within_s: float) -> str:
        """Why it failed, in a line; empty if it did not. Others use the machine, too, while a build takes its minutes."""
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(command)[:500]}\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                tethered(["nice", "-n", "10", *command]),
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(within_s)
            except subprocess.TimeoutExpired:
                return f"not done in {within_s:g} s"
            finally:
                if process.poll() is None:  # with what it has started, such as compilers
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        tail = self._log.read_bytes()[begin:].decode(errors="replace").strip().splitlines() or ["no output"]
        return f"{tail[-1]} (exit status {code})" if code else ""
