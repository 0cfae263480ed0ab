"""A child of this process that leads a session and a process group of its own: how it ends, with all its children.

The number of a process is free for another as soon as the process has been waited for (reaped). So nothing here, and nobody
else, sends a signal to a number after that.

A tracker is a child that multiprocessing, or loky, has started: it removes semaphores and shared memory once all others are gone,
and ends. So it is killed after them, and only if it does not end. What it prints is in the log, after all else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

REAP_SECONDS = 0.01
CHILDREN_SECONDS = 5.0
TRACKER_SECONDS = 2.0  # for trackers, to end by themselves
TRACKER = "resource_tracker import main"  # in its command line


class ProcessGroup:
    def __init__(self, pid: int, reap: Callable[[], int] | None = None) -> None:
        """``pid``: of the leader, and of the group. ``reap``: waits for the leader and returns its exit code, or minus a signal's number.

        The leader was started with ``start_new_session``, and is waited for here alone.
        """
        self.pid = pid
        self._reap = reap or (lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        self._code: int | None = None  # once it is reaped

    def code(self) -> int | None:
        """The leader's exit code, or minus a signal's number; None while it runs. It is not reaped."""
        if self._code is not None:
            return self._code
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    async def has_ended(self, seconds: float | None = None) -> bool:
        """Wait until the leader has ended, at most so long. It is not reaped."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it was reaped
            return True
        try:
            loop.add_reader(descriptor, lambda: None if ended.done() else ended.set_result(None))
            done, _ = await asyncio.wait({ended}, timeout=seconds)
            return bool(done)
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def signal(self, number: signal.Signals) -> None:
        """To the leader alone; nothing happens once it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """The leader and its children, at once, but for trackers; the leader is not reaped."""
        if self._code is None and not self._spare_trackers():
            self._kill_all()

    def end(self) -> int:
        """Kill whatever is left, and reap the leader; returns its exit code, or minus a signal's number."""
        for _ in self._ending():
            time.sleep(REAP_SECONDS)
        return self._reaped()

    async def wait(self) -> int:
        """Until the leader has ended, and the children that it left behind; returns as `end`."""
        await self.has_ended()
        for _ in self._ending():
            await asyncio.sleep(REAP_SECONDS)
        code = self._reaped()
        # Where this process is a subreaper, the children have become its own.
        deadline = time.monotonic() + CHILDREN_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-self.pid, os.WNOHANG) == (0, 0):
                    await asyncio.sleep(REAP_SECONDS)
        return code

    def _ending(self) -> Iterator[None]:
        """Kills what is left, and goes on as long as there are trackers that may end by themselves."""
        deadline = time.monotonic() + TRACKER_SECONDS
        while self._code is None and self._spare_trackers() and time.monotonic() < deadline:
            yield

    def _reaped(self) -> int:
        if self._code is None:
            self._kill_all()  # while the number can't be another's
            self._code = self._reap()
        return self._code

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _spare_trackers(self) -> bool:
        """If there are trackers, kill the others; returns whether there are any."""
        import psutil  # the program below does without installed libraries

        trackers, others = list[psutil.Process](), list[psutil.Process]()
        try:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended
                    if os.getpgid(process.pid) == self.pid:
                        (trackers if TRACKER in " ".join(process.cmdline()) else others).append(process)
        except OSError:  # as when this process has no more file descriptors
            return False
        for process in others if trackers else ():
            with contextlib.suppress(psutil.Error):
                process.kill()
        return bool(trackers)


# Tie a process to its parent: when the parent dies, however it dies, the kernel ends this one.
#
# As a program, `python tether.py PARENT COMMAND...` ties itself to PARENT and becomes COMMAND. A launcher starts workers
# through it because running code between fork and exec is not safe in a process that has threads. Imports only the
# standard library, so that it starts quickly without `site`.


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends. No effect off Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tethered(command: list[str]) -> list[str]:
    """The command line that runs ``command`` as a child which can't outlive this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> int:
    parent, command = int(argv[0]), argv[1:]
    die_with_parent()
    if os.getppid() != parent:  # it died before we were tied to it
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"can't run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
