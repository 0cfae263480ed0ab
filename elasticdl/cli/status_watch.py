"""Following a job, wherever it runs: what its master tells as it comes, and what the job has to show in the end."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from enum import Enum
from types import TracebackType
from typing import Self

from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.screens import Screen
from elasticdl.cli.wording import is_over, news, summary_lines
from elasticdl.common.errors import UnreachableError
from elasticdl.common.journal import Entry
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.1
RECONNECT_SECONDS = 0.5
JOIN_SECONDS = 5.0


class WatchEnded(Enum):
    """The last status of all has been told: the stream has ended as it should, with the job."""

    WATCH_ENDED = "watch ended"


class Watch:
    """Threads that read from a master, through any change of masters; leaving the context closes the client.

    ``reads`` of the client's methods are begun anew when they end: `watch` for the status, or `follow_events` for lines
    of the journal, of which each master tells all. ``failure`` says why nothing is heard at the moment; empty while a
    master answers.
    """

    def __init__(
        self, client: MasterClient, *reads: Callable[[], Iterable[pb.JobStatus]] | Callable[[], Iterable[str]]
    ) -> None:
        self.inbox: queue.SimpleQueue[pb.JobStatus | str | WatchEnded] = queue.SimpleQueue()
        self.failure = ""
        self._client = client
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(read,), name="watch", daemon=True) for read in reads]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._over.set()
        self._client.close()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def next(self) -> pb.JobStatus | str | WatchEnded | None:
        """What has come; None if nothing did for a moment."""
        try:
            return self.inbox.get(timeout=POLL)
        except queue.Empty:
            return None

    def _run(self, read: Callable[[], Iterable[pb.JobStatus | str]]) -> None:
        told: pb.JobStatus | str = ""
        while not self._over.is_set():
            try:
                for told in read():
                    self.failure = ""
                    self.inbox.put(told)
            except UnreachableError as error:  # whether the master still lives is for the main thread to find out
                self.failure = str(error)
            if isinstance(told, pb.JobStatus) and is_over(told):
                self.inbox.put(WatchEnded.WATCH_ENDED)
                return
            self._over.wait(RECONNECT_SECONDS)  # on a cluster another master may take over


def show_news(journal: Iterable[str], screen: Screen) -> None:
    for line in journal:
        if (text := news(json.loads(line))) is not None:
            screen.line(text)


def show_end(status: pb.JobStatus, journal: Iterable[Entry], output: str) -> None:
    """What a job that is over has to show; for a failed one the user's traceback, if that was the cause."""
    if status.phase == "failed" and status.traceback:
        print(status.traceback.rstrip(), file=sys.stderr)
    if status.phase in ("succeeded", "stopped"):
        print("\n".join(summary_lines(status, journal, output)), flush=True)
