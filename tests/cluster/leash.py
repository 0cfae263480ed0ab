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
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIFELINE = 0
_AFTERWARDS = "--afterwards="


def main(command: list[str]) -> int:
    afterwards = json.loads(command.pop(0).removeprefix(_AFTERWARDS)) if command[0].startswith(_AFTERWARDS) else []
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans below become our children
    child = os.fork()
    if child == 0:
        _become(command)
    threading.Thread(target=_obey, args=(os.pidfd_open(child),), daemon=True).start()
    ended = status = 0
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    _end_descendants()
    if afterwards:
        subprocess.run(afterwards, stdin=subprocess.DEVNULL, check=False)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _become(command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), _LIFELINE)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"can't run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _obey(child: int) -> None:
    """``child``: a file descriptor, which never means another process once this one is gone."""
    numbers = b"?"
    while numbers:
        numbers = os.read(_LIFELINE, 64)
        for number in numbers or (signal.SIGKILL,):
            try:
                signal.pidfd_send_signal(child, number)
            except ProcessLookupError:
                return


def _end_descendants() -> None:
    """Kill children until none is left: what a killed one leaves behind becomes our child in turn."""
    while True:
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if _parent(pid) == os.getpid():
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended since it was listed
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
