"""A child process that leads a session, and all that it has started there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """``process``: was started with ``start_new_session``, and is awaited here alone.

    That it has ended is seen without reaping it: until `end` its number, which is that of the group, can't become another's.
    """

    process: subprocess.Popen[bytes]

    def has_ended(self) -> bool:
        return self.code() is not None

    def code(self) -> int | None:
        """The exit code, or minus a signal's number; None while it runs."""
        if self.process.returncode is not None:
            return self.process.returncode
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def terminate(self) -> None:
        """Ask the leader to end. `Popen.terminate` would reap one that has ended."""
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Whatever is left of the group; it is not reaped yet."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left, and reap the leader."""
        self.kill()
        self.process.wait()
