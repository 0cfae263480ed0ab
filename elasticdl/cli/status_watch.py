"""Following a job, wherever it runs: what its master tells as it comes, and what the job has to show in the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.outlets import tell
from elasticdl.cli.screens import Screen
from elasticdl.cli.wording import is_over, summary_lines
from elasticdl.common.errors import UnreachableError
from elasticdl.job.events import KINDS, news
from elasticdl.job.facts import Facts
from elasticdl.job.journal import Entry, parse_entry
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.1
RECONNECT_SECONDS = 0.5
JOIN_SECONDS = 5.0
Heard = pb.JobStatus | str  # or a line of the journal


@contextmanager
def watched(client: MasterClient, *reads: Callable[[], Iterable[Heard]]) -> Iterator[JobWatch]:
    """Threads that read from a master, through any change of masters; leaving the context closes the client.

    ``reads`` are methods of the client, which are called anew when they end: `watch` for the status, or `events` for lines
    of the journal, of which each master tells all.
    """
    watch = JobWatch()
    threads = [threading.Thread(target=watch.read_on, args=(read,), name="watch", daemon=True) for read in reads]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        watch.over.set()
        client.close()
        for thread in threads:
            thread.join(JOIN_SECONDS)


class JobWatch:
    """``failure`` says why nothing is heard at the moment; empty while a master answers.

    ``ended``: the status stream has ended as it should, with the job; what it told last may still be in the inbox.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self.failure = ""  # written after what came before it is in the inbox
        self.ended = False
        self.over = threading.Event()

    def goes_on(self, *, master_lives: bool = True) -> bool:
        """Whether something has been told that was not taken, or more may come.

        ``master_lives``: of a master that has ended, what it sent before may still be on its way until the stream fails.
        """
        no_more = self.ended or (self.failure and not master_lives)  # asked first: the last comes before it
        return not no_more or not self.inbox.empty()

    def next(self) -> Heard | None:
        """What has come; None if nothing did for a moment."""
        try:
            return self.inbox.get(timeout=POLL)
        except queue.Empty:
            return None

    def read_on(self, read: Callable[[], Iterable[Heard]]) -> None:
        told: Heard = ""
        while not self.over.is_set():
            try:
                for told in read():
                    self.failure = ""
                    self.inbox.put(told)
            except UnreachableError as error:  # whether the master still lives is for the main thread to find out
                self.failure = str(error)
            except ValueError:  # gRPC's, of a call through a client that has just been closed
                return
            if isinstance(told, pb.JobStatus) and is_over(told):
                self.ended = True
                return
            self.over.wait(RECONNECT_SECONDS)  # on a cluster another master may take over


def show_news(journal: Iterable[str], screen: Screen) -> None:
    for line in journal:
        text, entry = None, parse_entry(line)
        # Who follows a job of this machine keeps it alive: an entry that is damaged, or made up, must not end the training.
        with suppress(Exception):
            text = news(entry) if entry is not None else None
        if entry is not None and text is not None:
            event = entry["event"]
            if KINDS[event].passing:
                screen.passing(event, text)
            else:
                screen.line(text)


def show_end(
    status: pb.JobStatus, journal: Iterable[Entry], output: str, has_shown: Callable[[str], bool] = lambda text: False
) -> None:
    """What a job that is over has to show; for a failed one the user's traceback, if that was the cause.

    ``has_shown``: whether a text stands on the screen already, as a worker has printed it.
    """
    if status.phase == "failed" and status.traceback and not has_shown(status.traceback.strip()):
        tell(status.traceback.rstrip())
    if status.phase in ("succeeded", "stopped"):
        tell("\n".join(summary_lines(status, Facts.of(journal).result(), output)))
