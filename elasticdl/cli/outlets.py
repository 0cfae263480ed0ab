"""Where a command writes what others print: its own stdout and stderr, which may be closed, slow or full.

Nothing that happens there may harm a job. So whoever writes much writes from a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from enum import Enum
from typing import TextIO


class Stream(Enum):
    OUT = "stdout"
    ERR = "stderr"


def tell(text: str) -> None:
    """A line for a person, on stderr; if nobody can read it any more, that is no matter."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Outlet:
    """One of this process's descriptors, for bytes as they come."""

    def __init__(self, descriptor: int, stream: Stream) -> None:
        self._descriptor = descriptor
        self.stream = stream
        self._is_broken = False  # nothing is written any more

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> str:
        """All of it, however long that takes; if it can't be written, returns what is to be said of that, once."""
        rest = memoryview(data)
        while rest and not self._is_broken:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody else who has it, too, has set it so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._is_broken = True
                why = "its reader is gone" if error.errno == errno.EPIPE else (error.strerror or str(error))
                return f"{self.stream.value} can't be written ({why}): what workers print goes on in their logs"
        return ""

    def ends_at(self, other: Outlet) -> bool:
        """Whether both lead to the same terminal, pipe or file."""
        mine, theirs = os.fstat(self._descriptor), os.fstat(other._descriptor)
        return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


def own_outlets() -> tuple[Outlet, Outlet]:
    """This process's stdout and stderr."""
    return Outlet(_descriptor(sys.stdout, 1), Stream.OUT), Outlet(_descriptor(sys.stderr, 2), Stream.ERR)


def _descriptor(stream: TextIO, usual: int) -> int:
    try:
        return stream.fileno()
    except OSError:  # somebody has put one in its place that has none
        return usual
