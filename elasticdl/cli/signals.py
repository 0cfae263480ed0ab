"""Ctrl-C, SIGTERM and SIGHUP while a job is under way: noted by the handler, acted upon by the main thread."""

from __future__ import annotations

import collections
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the command to end; like KeyboardInterrupt no error, so nothing catches it by accident."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


def interrupt(number: int) -> None:
    """A handler for times when there is nothing to wind down."""
    raise Interrupted(number)


class SignalLog:
    """A handler that only records signals; the loops that wait take them."""

    def __init__(self) -> None:
        self._pending: collections.deque[int] = collections.deque()
        self.first: int | None = None

    def add(self, number: int) -> None:
        self.first = self.first or number
        self._pending.append(number)

    def add_or_raise(self, number: int) -> None:
        """The first lets the present request finish, as nobody would know what it did; the second breaks it off."""
        impatient = self.first is not None
        self.add(number)
        if impatient:
            raise Interrupted(number)

    def raise_first(self) -> None:
        if self.first is not None:
            raise Interrupted(self.first)

    def take(self) -> bool:
        """Take the oldest signal; whether there was one."""
        try:
            self._pending.popleft()
        except IndexError:
            return False
        return True


@contextmanager
def caught(handler: Callable[[int], None]) -> Iterator[None]:
    """Call the handler for each signal. A SIGHUP that was ignored from the start, as by nohup, stays so.

    A shell has a job that it starts with ``&`` ignore SIGINT: whoever sends it one means it.
    """

    def call(number: int, frame: FrameType | None) -> None:
        handler(number)

    before = {number: signal.getsignal(number) for number in CAUGHT}
    mine = [number for number, old in before.items() if number != signal.SIGHUP or old is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, call)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])
