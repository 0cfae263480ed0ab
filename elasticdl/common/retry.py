"""Trying again until there is an answer, and waiting until something is so."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import ElasticDLError, UnreachableError
from elasticdl.common.reason import flat

T = TypeVar("T")


async def retry(
    attempt: Callable[[], Awaitable[T]],
    what: str,
    backoff: Backoff,
    seconds: float = math.inf,
    failed: Callable[[Exception], None] = lambda _: None,
    lasting: Callable[[Exception], object] = lambda _: False,
) -> T:
    """Attempt until it succeeds; ``failed`` is told each failure after which it is tried again. One that is ``lasting`` is raised.

    Raises:
        UnreachableError: ``seconds`` were over before it succeeded.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            return await attempt()
        except (ElasticDLError, OSError) as error:
            if lasting(error):
                raise
            failure = error
        delay = backoff.delay(getattr(failure, "retry_after", 0.0))
        if loop.time() + delay > deadline:
            raise UnreachableError(f"can't {what}: {failure}") from failure
        failed(failure)
        await asyncio.sleep(delay)


async def until(condition: Callable[[], object], changed: asyncio.Event, seconds: float) -> None:
    """Wait until that is so, at most so long; ``changed`` is set whenever it is to be looked at again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                changed.clear()
                await changed.wait()


# Whether a worker, or the agent of a place, reaches its master, and what it says of that in its log: a line after ten
# seconds without an answer, further ones at growing intervals, and one when the master has answered after all.


TOLD_SECONDS = 10.0
GROWTH = 2.0  # of the time without an answer, from line to line
# An attempt that has had no answer for so long has none to expect: a master answers from memory.
ATTEMPT_SECONDS = 30.0
FIRST_DELAY, DELAY_GROWTH, LONGEST_DELAY = 0.2, 1.5, 1.0
NO_ANSWER = "no answer"
NO_HANDSHAKE = "the TLS handshake fails"
# What gRPC's details contain, and what it means.
_PLAIN = (
    (r"lookup|DNS|ARES_", "its name can't be resolved"),
    (r"Connection refused", "the connection is refused, as nothing listens there"),
    (r"No route to host|unreachable", "there is no route to it"),
    (r"[Hh]andshake.*Socket closed", "the connection is closed in the TLS handshake"),
    (r"[Hh]andshake|SSL_", NO_HANDSHAKE),
    (r"timed out|timeout|Deadline|cancelled", NO_ANSWER),
    (r"Socket closed|Connection reset|End of TCP|GOAWAY", "the connection is closed at once"),
    (r"HTTP/2|http2", "what answers there is no master"),
)


class Silence:
    """Measures for how long the master at ``address`` has not answered, and says what to log and when to try again.

    ``limit``: seconds without a master after which ``who`` gives up. Any thread may call; time is passed in.
    """

    def __init__(self, address: str, limit: float, who: str = "worker") -> None:
        self._who = who
        self._address = address
        self._limit = limit
        self._lock = threading.Lock()
        self._since = self._attempt = math.inf  # without an answer; when the present attempt has begun
        self._answered = False
        self._problem = NO_ANSWER
        self._due = TOLD_SECONDS  # of silence, at which a line is due
        self._backoff = Backoff(first=FIRST_DELAY, longest=LONGEST_DELAY, factor=DELAY_GROWTH)
        self.met = False  # it has answered once

    def begin(self, now: float) -> None:
        """An attempt begins."""
        with self._lock:
            self._attempt, self._since = now, min(now, self._since)

    def answer(self, now: float) -> str:
        """The master has answered; returns the line to log, if any."""
        with self._lock:
            told, self._due = self._due > TOLD_SECONDS, TOLD_SECONDS
            self._backoff.reset()
            self._problem = NO_ANSWER
            self._answered = self.met = True
            return (
                f"this {self._who} has reached the master at {self._address} after {now - self._since:.0f} s"
                if told
                else ""
            )

    def end(self, now: float) -> None:
        """The attempt, or the conversation, is over. If the master had answered in it, the silence begins now."""
        with self._lock:
            if self._answered:
                self._since, self._answered = now, False

    def fail(self, problem: str) -> float:
        """``problem``: why the attempt is over. Returns the seconds until the next attempt."""
        with self._lock:
            self._problem = problem
            return self._backoff.delay()

    def look(self, now: float) -> str:
        """The line to log now, if any; to be called regularly."""
        with self._lock:
            seconds = self._silence(now)
            if seconds < self._due:
                return ""
            self._due = GROWTH * seconds
            return (
                f"this {self._who} has not reached the master at {self._address} for {seconds:.0f} s: {self._problem}; it goes on "
                f"trying, and gives up after {self._limit:g} s"
            )

    def silence(self, now: float) -> float:
        """For how long there has been no answer."""
        with self._lock:
            return self._silence(now)

    def stalls(self, now: float) -> bool:
        """Whether the present attempt should be ended: gRPC's own end of one may be long after the worker is to give up."""
        with self._lock:
            return not self._answered and (now - self._attempt > ATTEMPT_SECONDS or self._silence(now) > self._limit)

    def _silence(self, now: float) -> float:
        return 0.0 if self._answered else now - self._since


def in_words(details: str) -> str:
    """What gRPC says of a call that failed, in a person's words."""
    found = (words for pattern, words in _PLAIN if re.search(pattern, details))
    return next(found, flat(details) or NO_ANSWER)
