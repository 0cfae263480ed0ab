"""Following a job that this command has started: status and news go to the screen, signals become requests to stop.

The status comes from the master's stream, read by one thread into an inbox; the news come from the journal's file,
where they still are when the master is gone. The main thread does everything else.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elasticdl.cli.client import MasterClient, connect
from elasticdl.cli.master_process import CLOSING_TIME, MasterProcess
from elasticdl.cli.panel import Screen
from elasticdl.cli.tail import Tail
from elasticdl.cli.text import is_over, news
from elasticdl.common.errors import UnreachableError
from elasticdl.common.jobdir import MasterAddress
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.1
RECONNECT_SECONDS = 0.5
KILL_SECONDS = 3.0  # that a master gets to stop at once


class WatchEnded(Enum):
    """The last thing in the inbox: the stream has ended as it should, with the job."""

    WATCH_ENDED = "watch ended"


Inbox: TypeAlias = "queue.SimpleQueue[pb.JobStatus | WatchEnded]"


class Interruptions:
    """What the signals so far mean: the first asks for a clean stop, the second for one at once, the third kills."""

    def __init__(self, client: MasterClient, screen: Screen, stop_grace: float) -> None:
        self._client = client
        self._screen = screen
        self._stop_grace = stop_grace
        self._count = 0
        self._deadline = float("inf")

    def add(self, now: float) -> None:
        self._count += 1
        if self._count == 1:
            self._client.stop_soon("interrupted", checkpoint=True)
            self._deadline = now + self._stop_grace + CLOSING_TIME
            self._screen.line("stopping after this step; press Ctrl-C again to stop at once")
        elif self._count == 2:
            self._client.stop_soon("interrupted twice", checkpoint=False, now=True)
            self._deadline = now + KILL_SECONDS
            self._screen.line("stopping at once")
        else:
            self._deadline = now

    def are_over(self, now: float) -> bool:
        """The master has had the time that they allow."""
        return now >= self._deadline


@dataclass(frozen=True, slots=True)
class Following:
    """Shows a job until it has ended, its master is gone, or the user's patience is (then the master is killed)."""

    master: MasterProcess
    journal: Tail
    screen: Screen
    interrupted: Callable[[], bool]
    stop_grace: float

    def run(self, address: MasterAddress | None) -> None:
        """``address`` is None for a job that ended sooner than it could be reached: its news are shown all the same."""
        if address is not None:
            inbox: Inbox = queue.SimpleQueue()
            with connect(address) as client, watching(client, inbox):
                self._show_all(inbox, Interruptions(client, self.screen, self.stop_grace))
        self.master.wait(CLOSING_TIME)
        self._show_news()

    def _show_all(self, inbox: Inbox, interruptions: Interruptions) -> None:
        while not self.master.has_ended() or not inbox.empty():
            self._show_news()
            if self.interrupted():
                interruptions.add(time.monotonic())
            if interruptions.are_over(time.monotonic()):
                self.master.kill()
                return
            try:
                status = inbox.get(timeout=POLL)
            except queue.Empty:
                continue
            if isinstance(status, WatchEnded):
                return
            self.screen.show(status)

    def _show_news(self) -> None:
        for line in self.journal.lines():
            if (text := news(json.loads(line))) is not None:
                self.screen.line(text)


@contextmanager
def watching(client: MasterClient, inbox: Inbox) -> Iterator[None]:
    """A thread that reads the job's status into the inbox; gone at the end, and the client is closed."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(client, inbox, over), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        client.close()
        thread.join(CLOSING_TIME)


def _watch(client: MasterClient, inbox: Inbox, over: threading.Event) -> None:
    status = pb.JobStatus()
    while not over.is_set():
        with contextlib.suppress(UnreachableError):  # whether the master still lives is the main thread's business
            for status in client.watch():
                inbox.put(status)
        if is_over(status):
            inbox.put(WatchEnded.WATCH_ENDED)
            return
        over.wait(RECONNECT_SECONDS)  # on a cluster another master may take over
