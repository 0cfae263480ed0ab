"""Following a job, wherever it runs: its status as it changes, the news in its journal, and what it has to show in the end."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterable
from enum import Enum
from types import TracebackType
from typing import Self, TypeAlias

from elasticdl.cli.line_streams import LineStream
from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.screens import Screen
from elasticdl.cli.wording import is_over, news, summary_lines
from elasticdl.common.errors import UnreachableError
from elasticdl.common.journal import Entry
from elasticdl.proto import elasticdl_pb2 as pb

RECONNECT_SECONDS = 0.5
JOIN_SECONDS = 5.0


class WatchEnded(Enum):
    """The last thing in the inbox: the stream has ended as it should, with the job."""

    WATCH_ENDED = "watch ended"


Inbox: TypeAlias = "queue.SimpleQueue[pb.JobStatus | WatchEnded]"


class StatusWatch:
    """A thread that reads the job's status into `inbox`, through any change of masters; leaving the context closes the client.

    ``failure`` says why there is no status at the moment; empty while a master answers.
    """

    def __init__(self, client: MasterClient) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.failure = ""
        self._client = client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._over.set()
        self._client.close()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        status = pb.JobStatus()
        while not self._over.is_set():
            try:
                for status in self._client.watch():
                    self.failure = ""
                    self.inbox.put(status)
            except UnreachableError as error:  # whether the master still lives is for the main thread to find out
                self.failure = str(error)
            if is_over(status):
                self.inbox.put(WatchEnded.WATCH_ENDED)
                return
            self._over.wait(RECONNECT_SECONDS)  # on a cluster another master may take over


def show_news(journal: LineStream, screen: Screen) -> None:
    for line in journal.lines():
        if (text := news(json.loads(line))) is not None:
            screen.line(text)


def show_end(status: pb.JobStatus, journal: Iterable[Entry], output: str) -> None:
    """What a job that is over has to show; for a failed one the user's traceback, if that was the cause."""
    if status.phase == "failed" and status.traceback:
        print(status.traceback.rstrip(), file=sys.stderr)
    if status.phase in ("succeeded", "stopped"):
        print("\n".join(summary_lines(status, journal, output)), flush=True)
