"""Following a job that this command has started: its streams go to the screen, signals become requests to stop.

Two reader threads put what they receive into one inbox; the main thread takes it out and does everything else.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from elasticdl.cli.client import MasterClient, connect
from elasticdl.cli.master_process import CLOSING_TIME, MasterProcess
from elasticdl.cli.panel import Screen
from elasticdl.cli.text import news
from elasticdl.common.errors import UnreachableError
from elasticdl.common.jobdir import MasterAddress
from elasticdl.common.journal import Entry
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.1
RECONNECT_SECONDS = 0.5
LAST_MESSAGES_SECONDS = 0.5  # for what a master that has ended had still sent
KILL_SECONDS = 3.0  # that a master gets to stop at once


@dataclass(frozen=True, slots=True)
class Update:
    status: pb.JobStatus


@dataclass(frozen=True, slots=True)
class News:
    entry: Entry


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """One of the two streams has ended as it should: with the job."""


Message: TypeAlias = Update | News | StreamEnded
Inbox: TypeAlias = "queue.SimpleQueue[Message]"


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
            self._screen.line("stopping after this step; press Ctrl-C again to stop at once")
            self._client.stop_soon("interrupted", checkpoint=True)
            self._deadline = now + self._stop_grace + CLOSING_TIME
        elif self._count == 2:
            self._screen.line("stopping at once")
            self._client.stop_soon("interrupted twice", checkpoint=False, now=True)
            self._deadline = now + KILL_SECONDS
        else:
            self._deadline = now

    def are_over(self, now: float) -> bool:
        """The master has had the time that they allow."""
        return now >= self._deadline


@dataclass(frozen=True, slots=True)
class Following:
    """Shows a job until it has ended, its master is gone, or the user's patience is (then the master is killed)."""

    master: MasterProcess
    screen: Screen
    interrupted: Callable[[], bool]
    stop_grace: float

    def run(self, address: MasterAddress) -> None:
        inbox: Inbox = queue.SimpleQueue()
        with connect(address) as client:
            interruptions = Interruptions(client, self.screen, self.stop_grace)
            with reading(client, inbox):
                self._show_all(inbox, interruptions)
        while not inbox.empty():
            self._display(inbox.get())

    def _show_all(self, inbox: Inbox, interruptions: Interruptions) -> None:
        open_streams = 2
        while open_streams and not self.master.has_ended():
            if self.interrupted():
                interruptions.add(time.monotonic())
            if interruptions.are_over(time.monotonic()):
                self.master.kill()
                return
            try:
                message = inbox.get(timeout=POLL)
            except queue.Empty:
                continue
            open_streams -= isinstance(message, StreamEnded)
            self._display(message)

    def _display(self, message: Message) -> None:
        match message:
            case Update(status):
                self.screen.show(status)
            case News(entry):
                line = news(entry)
                if line is not None:
                    self.screen.line(line)


@contextmanager
def reading(client: MasterClient, inbox: Inbox) -> Iterator[None]:
    """Two threads that read the streams into the inbox; gone at the end, and the client is closed."""
    over = threading.Event()
    sources = {"watch": _Statuses(client).read, "events": _Entries(client).read}
    threads = [
        threading.Thread(target=_read, args=(source, inbox, over), name=name, daemon=True)
        for name, source in sources.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(LAST_MESSAGES_SECONDS)
        client.close()
        for thread in threads:
            thread.join(CLOSING_TIME)


class _Statuses:
    def __init__(self, client: MasterClient) -> None:
        self._client = client

    def read(self) -> Iterator[Message]:
        return (Update(status) for status in self._client.watch())


class _Entries:
    """After a broken connection the journal is sent again from its start: what has been seen is left out."""

    def __init__(self, client: MasterClient) -> None:
        self._client = client
        self._seen = 0

    def read(self) -> Iterator[Message]:
        for number, line in enumerate(self._client.events(), start=1):
            if number > self._seen:
                self._seen = number
                yield News(json.loads(line))


def _read(source: Callable[[], Iterator[Message]], inbox: Inbox, over: threading.Event) -> None:
    while not over.is_set():
        try:
            for message in source():
                inbox.put(message)
        except UnreachableError:
            over.wait(RECONNECT_SECONDS)  # whether the master still lives is the main thread's business
        else:
            inbox.put(StreamEnded())
            return
