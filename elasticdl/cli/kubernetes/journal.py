"""The journal of a job that goes on: from its master and, when that is replaced, from the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elasticdl.cli.client import MasterClient
from elasticdl.cli.kubernetes.text import Stream
from elasticdl.common.errors import ElasticDLError

if TYPE_CHECKING:
    from elasticdl.cli.kubernetes.job import ClusterJob

AGAIN_SECONDS = 1.0
JOIN_SECONDS = 5.0


@contextmanager
def followed_journal(job: ClusterJob) -> Iterator[Stream]:
    """Every entry once, until the job has ended."""
    following = _Following(job)
    stream = Stream("journal", following.run)
    stream.start()
    try:
        yield stream
    finally:
        stream.stopped.set()
        following.close()
        stream.stop(JOIN_SECONDS)


class _Following:
    def __init__(self, job: ClusterJob) -> None:
        self._job = job
        self._told: set[str] = set()  # each entry has its time, so no two are alike
        self._client: MasterClient | None = None

    def run(self, stream: Stream) -> None:
        while not stream.stopped.is_set():
            try:
                ended = self._read_from_master(stream)
            except ElasticDLError:
                ended = self._has_ended()
            if ended:
                self._read_what_is_left(stream)
                return
            stream.stopped.wait(AGAIN_SECONDS)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _read_from_master(self, stream: Stream) -> bool:
        """Whether the job is over: its master ends the stream only then."""
        with self._job.client() as self._client:
            for line in self._client.events(follow=True):
                self._tell(stream, line)
        return self._has_ended()

    def _read_what_is_left(self, stream: Stream) -> None:
        try:
            lines = self._job.state().journal.splitlines()
        except ElasticDLError:
            return
        for line in lines:
            self._tell(stream, line)

    def _has_ended(self) -> bool:
        try:
            return self._job.has_ended()
        except ElasticDLError:
            return False

    def _tell(self, stream: Stream, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            stream.put(line)
