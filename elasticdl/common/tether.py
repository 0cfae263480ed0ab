"""Tie a process to its parent: when the parent dies, however it dies, the kernel ends this one.

As a program, `python tether.py PARENT COMMAND...` ties itself to PARENT and becomes COMMAND. A launcher starts workers
through it because running code between fork and exec is not safe in a process that has threads. Imports only the
standard library, so that it starts quickly without `site`.
"""

import ctypes
import os
import signal
import sys

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
