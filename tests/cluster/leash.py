"""Run a command so that nothing of it survives: `python leash.py [--afterwards=COMMAND] COMMAND...`, reading a pipe.

Each byte that arrives is the number of a signal for the command. When the pipe is closed, also because its writer died,
the command is killed. When the command ends, whatever it started ends with it, as the processes of a container do, even
those that left its session. Then the command of `--afterwards`, a JSON list, is run, to remove what is not a process.
The exit status is the command's, 128 + the signal if one ended it.

Imports only the standard library, so that it starts quickly without `site`.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIFELINE = 0
_AFTERWARDS = "--afterwards="


def main(command: list[str]) -> int:
    afterwards = json.loads(command.pop(0).removeprefix(_AFTERWARDS)) if command[0].startswith(_AFTERWARDS) else []
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans below become our children
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        _become(command)
    code = _follow(child, woken)
    _end_descendants()
    if afterwards:
        subprocess.run(afterwards, stdin=subprocess.DEVNULL, check=False)
    return code


def _become(command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), _LIFELINE)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"can't run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _follow(child: int, woken: int) -> int:
    """Pass signals on until the child has ended; its exit status."""
    sources = [_LIFELINE, woken]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if _LIFELINE in ready:
            numbers = os.read(_LIFELINE, 64)
            for number in numbers or (signal.SIGKILL,):
                os.kill(child, number)
            if not numbers:
                sources.remove(_LIFELINE)
        if woken in ready:
            os.read(woken, 4096)
        status = _reap(child)
        if status is not None:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap(child: int) -> int | None:
    """Collect all that has ended, orphans too; the child's status if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _end_descendants() -> None:
    """Kill children until none is left: what a killed one leaves behind becomes our child in turn."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    me = os.getpid()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended since it was listed
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
