"""The build of a session's programs, beside its tests."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Self

from tests.cluster.build import cache_folder
from tests.cluster.processes import Leashed

_REPOSITORY = Path(__file__).resolve().parents[2]
# What has been fetched and compiled is a hundred thousand files.
_ENDS_WITHIN_S = 30.0
_POLL_S = 0.2


class Need:
    """That this process needs the programs. Other test processes of this user see it until it is given up."""

    def __init__(self) -> None:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "kubernetes-build.needed").open("w")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def is_others(self) -> bool:
        """Whether somebody else has it, once this one is given up."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        self.give_up()
        return False

    def give_up(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


class Building:
    """A process that has the programs built, and ends with this one. Whoever needs them asks ``build`` itself, and waits."""

    def __init__(self, process: Leashed) -> None:
        self._process = process

    @classmethod
    def start(cls, run: str, *, full: bool) -> Self:
        """``run``: whose build it is, see ``build.require``; ``full``: what kubelets and containers need, too."""
        command = [sys.executable, "-m", "tests.cluster.build", "--run", run, *(["--node"] if full else [])]
        env = {**os.environ, "PYTHONPATH": str(_REPOSITORY)}
        return cls(Leashed.start(command, Path(os.devnull), env))

    def wait_while(self, need: Need) -> None:
        """Returns when it is done, or nobody else needs it any more. Each step of the build has a time to be done in."""
        while self._process.running and need.is_others():
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Also half-way."""
        self._process.signal(signal.SIGTERM)
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except TimeoutError:
            self._process.stop()
