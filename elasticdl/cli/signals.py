"""Ctrl-C, SIGTERM and SIGHUP while a job is under way: noted by the handler, acted upon by the main thread."""

from __future__ import annotations

import collections
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One wish that comes twice: the kernel and the shell both send SIGHUP when a terminal closes; `timeout` signals a process and its group.
ECHO_SECONDS = 1.0
# Faster than a person presses Ctrl-C twice: below `timeout` a terminal's SIGINT comes from both.
FINGER_SECONDS = 0.05


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
    """A handler that only records signals; the loops that wait take them. Only Ctrl-C can be meant twice within `ECHO_SECONDS`, as fast as a person can."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: collections.deque[int] = collections.deque()
        self._last = -math.inf, 0  # when the last signal came, and its number
        self.first: int | None = None

    def add(self, number: int) -> None:
        (before, last), now = self._last, self._clock()
        self._last = now, number
        if number == signal.SIGINT:
            is_echo = last == number and now - before < FINGER_SECONDS
        else:
            is_echo = now - before < ECHO_SECONDS
        if not is_echo:
            self.first = self.first or number
            self._pending.append(number)

    def raise_first(self) -> None:
        if self.first is not None:
            raise Interrupted(self.first)

    def take(self) -> bool:
        """Take the oldest signal; whether there was one."""
        return bool(self._pending) and self._pending.popleft() > 0


@contextmanager
def caught(handler: Callable[[int], object]) -> Iterator[None]:
    """Call the handler for each signal. A SIGHUP that was ignored from the start, as by nohup, stays so.

    A shell has a job that it starts with ``&`` ignore SIGINT: whoever sends it one means it.
    """
    before = {number: signal.getsignal(number) for number in CAUGHT}
    mine = [number for number, old in before.items() if number != signal.SIGHUP or old is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, lambda number, frame: handler(number))
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])
