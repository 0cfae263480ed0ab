"""Child processes that cannot outlive this one, in whatever thread they were started."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import leash

_KILLED_WITHIN_S = 10.0


class Leashed:
    """A command together with all that it starts (``leash`` says how). Ends when this process does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        log: Path | None,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        afterwards: Sequence[str] = (),
    ) -> Leashed:
        """Run ``command`` with its output appended to ``log`` (None: where this process's goes).

        By default with this process's environment. Once nothing of it is left, in whatever way it ended, ``afterwards`` is run.
        """
        more = [f"--afterwards={json.dumps(afterwards)}"] if afterwards else []
        leashed = [sys.executable, "-I", "-S", leash.__file__, *more, *command]
        how: Any = {"stdin": subprocess.PIPE, "env": env, "cwd": folder}
        with log.open("ab") if log else contextlib.nullcontext() as sink:
            # In a session of its own: a terminal's Ctrl-C is for us alone.
            return cls(subprocess.Popen(leashed, stdout=sink, stderr=sink, start_new_session=True, **how))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the command itself; nothing happens if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(bytes([number]))
            self._process.stdin.flush()

    def kill(self) -> None:
        """Have everything of the command killed; ``wait`` tells when it is."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as a shell has it, once nothing is left.

        Raises:
            TimeoutError: it has not ended in ``timeout`` seconds.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"process {self._process.pid} has not ended in {timeout} s") from error

    def stop(self) -> None:
        """Kill and wait."""
        self.kill()
        self.wait(_KILLED_WITHIN_S)
