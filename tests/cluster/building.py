"""The build of a session's programs, beside its tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Self

from tests.cluster.processes import Leashed

_REPOSITORY = Path(__file__).resolve().parents[2]
# What has been fetched and compiled is a hundred thousand files.
_ENDS_WITHIN_S = 30.0


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

    def stop(self) -> None:
        """If it is not done it is no longer needed."""
        self._process.signal(signal.SIGTERM)
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except TimeoutError:
            self._process.stop()
