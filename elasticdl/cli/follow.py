"""Following a job, wherever it is: each entry of its journal once, and its statuses beside, until it is over.

What a master tells may be lost with it, or break off on its way. So at the end comes what was kept: the rest of the journal, and the
last status.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Generic, TypeAlias, TypeVar

from elasticdl.cli.master_client import MasterClient
from elasticdl.common.errors import ElasticDLError, UnreachableError
from elasticdl.job.journal import number_of
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.05
AGAIN_SECONDS = 1.0  # before a master is asked once more
JOIN_SECONDS = 5.0  # for a stream to end by itself, and for one that was closed
KEPT_TRIES = 60  # for what is kept, as a cluster may just then not answer
MOST_LINES = 20_000  # that are taken at once
Heard: TypeAlias = str | pb.JobStatus  # a line of the journal, or a status
Open: TypeAlias = Callable[[], AbstractContextManager[MasterClient]]
T = TypeVar("T")


class StreamReader(Generic[T]):
    """A thread that reads what masters tell, through any change of masters, and at the end what is kept.

    ``read``: a stream of a master's. ``has_ended``: whether the job is over, asked whenever a stream has ended or failed.
    """

    def __init__(
        self,
        master: Open,
        read: Callable[[MasterClient], Iterable[T]],
        has_ended: Callable[[], object],
        kept: Callable[[], Iterable[T]],
    ) -> None:
        self._open = master
        self._read = read
        self._has_ended = has_ended
        self._kept = kept
        self._inbox: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._last = threading.Event()  # no other stream is begun
        self._end_by = math.inf  # from then on a stream that has not ended is closed
        self._leave_by = math.inf  # until then its end is waited for
        self._master: MasterClient | None = None
        self.failure = ""  # why nothing is heard at the moment
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        return not self._thread.is_alive()

    def take(self) -> list[T]:
        """What has come, a part of it if it is much."""
        taken: list[T] = []
        with suppress(queue.Empty):
            while len(taken) < MOST_LINES:
                taken.append(self._inbox.get_nowait())
        return taken

    def finish(self) -> None:
        """The job is over: the stream that is open may come to its end, but for a connection that hangs. To be called again until it is
        complete."""
        if not self._last.is_set():
            self._last.set()
            self._end_by = time.monotonic() + JOIN_SECONDS
        elif time.monotonic() > self._end_by:
            self._hang_up()

    def leave(self) -> None:
        """Nobody reads any more; as `close` without waiting."""
        self._kept = tuple
        self._last.set()
        self._leave_by = min(self._leave_by, time.monotonic() + JOIN_SECONDS)
        self._hang_up()

    def close(self) -> None:
        """What is open is closed by the time this returns, unless the network hangs."""
        self.leave()
        self._thread.join(max(0.0, self._leave_by - time.monotonic()))

    def _hang_up(self) -> None:
        if master := self._master:
            master.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            try:
                self._read_stream()
            except (ElasticDLError, OSError) as error:
                self.failure = str(error)
            except ValueError:  # gRPC's, of a client that has just been closed
                pass
            is_last = self._last.is_set()
            with suppress(ElasticDLError, OSError):
                is_last = is_last or bool(self._has_ended())
            if not is_last:
                self._last.wait(AGAIN_SECONDS)
        for _ in range(KEPT_TRIES):
            try:
                return self._tell(self._kept())
            except (UnreachableError, OSError) as error:
                self.failure = str(error)
                time.sleep(AGAIN_SECONDS)
            except ElasticDLError as error:  # damaged: it will not be better
                self.failure = str(error)
                return None
        return None

    def _read_stream(self) -> None:
        if self._last.is_set():
            return
        with self._open() as master:
            self._master = master
            try:
                if not self._last.is_set():  # else it may not have been closed
                    self._tell(self._read(master))
            finally:
                self._master = None

    def _tell(self, stream: Iterable[T]) -> None:
        for told in stream:
            self.failure = ""
            self._inbox.put(told)


class NewLines:
    """Which lines of a journal are new to somebody who is told it more than once: by each master, and from what is kept.

    An older master gives its entries no numbers, and tells all of them: such lines are known by their places in the journal.
    """

    def __init__(self) -> None:
        self.number = 0  # of the newest entry
        self._place = self._most = 0

    def of(self, journal: Iterable[str]) -> Iterator[str]:
        """``journal``: told from its beginning, or from after that newest entry."""
        self._place = 0
        return filter(self.is_new, journal)

    def is_new(self, line: str) -> bool:
        """Of the next line."""
        self._place += 1
        if number := number_of(line):
            is_new, self.number = number > self.number, max(number, self.number)
        else:
            is_new, self._most = self._place > self._most, max(self._place, self._most)
        return is_new


class Following:
    """Iterates over what comes of a job, until it is over; None whenever nothing has come for a moment.

    ``has_ended``: asked in the thread that iterates, each ``look_seconds`` in which nothing comes.
    """

    def __init__(
        self,
        entries: StreamReader[str],
        statuses: StreamReader[pb.JobStatus] | None,
        has_ended: Callable[[], object],
        look_seconds: float,
    ) -> None:
        self._statuses = statuses
        self._sources: Sequence[StreamReader[str] | StreamReader[pb.JobStatus]] = (
            (entries, statuses) if statuses else (entries,)
        )
        self._has_ended = has_ended
        self._look_seconds = look_seconds
        self._look_at = 0.0

    @property
    def failure(self) -> str:
        """Why its master is not heard of at the moment; empty while it is."""
        return self._statuses.failure if self._statuses else ""

    def __iter__(self) -> Iterator[Heard | None]:
        over = is_last = False
        while not is_last:
            over = over or self._is_over()
            if over:
                for source in self._sources:
                    source.finish()
            is_last = all(
                source.is_complete for source in self._sources
            )  # asked first: what came before that is taken once more
            nothing = True
            for heard in self._taken(to_end=is_last):
                nothing = False
                self._look_at = time.monotonic() + self._look_seconds
                yield heard
            if nothing and not is_last:
                yield None
                time.sleep(POLL)

    def close(self) -> None:
        for source in self._sources:
            source.leave()  # all connections end at the same time
        for source in self._sources:
            source.close()

    def _is_over(self) -> bool:
        """A job may be over without a word on any stream."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + self._look_seconds
        with suppress(UnreachableError):  # a cluster that does not answer may do so later
            return bool(self._has_ended())
        return False

    def _taken(self, *, to_end: bool) -> Iterator[Heard]:
        for source in self._sources:
            more = True
            while more:
                heard = source.take()
                more = to_end and bool(heard)
                yield from heard
