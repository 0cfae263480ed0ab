"""The journal and the logs of a job on a cluster, as far as they can still be had, and as they come."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import urllib3

from elasticdl.cli.line_streams import ThreadLines, by_writer, merged, prefix
from elasticdl.cli.master_client import MasterClient
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.kubernetes.api_error import NotDoneError
from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.job_pods import find_pods
from elasticdl.kubernetes.manifests.names import WORKER_LABEL, Role
from elasticdl.kubernetes.manifests.packed_state import State

AGAIN_SECONDS = 1.0  # before a master is asked once more
LOOK_SECONDS = 2.0  # between two looks for further pods
JOIN_SECONDS = 5.0


class SourceJob(Protocol):
    """What is asked of a job that is followed."""

    @property
    def name(self) -> str: ...

    @property
    def client(self) -> Client: ...

    def master(self) -> AbstractContextManager[MasterClient]: ...

    def has_ended(self) -> bool: ...

    def state(self) -> State: ...


class Told:
    """The entries of a journal that have been told: each master tells them all, from the first.

    Only the last are kept. An entry older than those was told long ago: entries are in the order of time, but for the
    clocks of masters, which differ by less than so many entries take.
    """

    def __init__(self, kept: int = 5000) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=kept)
        self._known: set[str] = set()  # of these lines; each has its time, so no two are alike

    def is_new(self, line: str) -> bool:
        """Whether it is told for the first time; from now on it is told."""
        if line in self._known or (self._is_full() and _time(line) < _time(self._lines[0])):
            return False
        if self._is_full():
            self._known.discard(self._lines[0])
        self._lines.append(line)
        self._known.add(line)
        return True

    def _is_full(self) -> bool:
        return len(self._lines) == self._lines.maxlen


def _time(line: str) -> float:
    return float(json.loads(line)["time"])


class Reader(Protocol):
    def run(self, stream: ThreadLines) -> None:
        """In a thread, until there is nothing more or the stream is stopped."""

    def close(self) -> None:
        """Break off what is being read."""


@contextmanager
def followed(reader: Reader) -> Iterator[ThreadLines]:
    stream = ThreadLines("reader", reader.run)
    stream.start()
    try:
        yield stream
    finally:
        stream.stopped.set()
        reader.close()
        stream.stop(JOIN_SECONDS)


class JournalReader:
    """Every entry once, until the job has ended."""

    def __init__(self, job: SourceJob) -> None:
        self._job = job
        self._told = Told()
        self._master: MasterClient | None = None

    def run(self, stream: ThreadLines) -> None:
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
        if self._master is not None:
            self._master.close()

    def _read_from_master(self, stream: ThreadLines) -> bool:
        """Whether the job is over: its master ends the stream only then."""
        with self._job.master() as self._master:
            for line in self._master.events(follow=True):
                self._tell(stream, line)
        return self._has_ended()

    def _read_what_is_left(self, stream: ThreadLines) -> None:
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

    def _tell(self, stream: ThreadLines, line: str) -> None:
        if self._told.is_new(line):
            stream.put(line)


def read_logs(client: Client, job: str, worker: int | None) -> list[str]:
    """What there is, in the order of time as far as the lines tell it.

    Raises:
        UserError: there is no such worker.
    """
    pods = find_pods(client, job, worker)
    if worker is not None and not pods:
        names = ", ".join(by_writer({writer(pod) for pod in find_pods(client, job, None)})) or "nobody"
        raise UserError(f"job {job} has no worker {worker}; it has logs of {names}")
    written: dict[str, list[str]] = {}
    for pod in pods:
        lines = written.setdefault(_prefix(pod, worker), [])
        try:
            lines += _text(client, pod).splitlines()
        except NotDoneError as error:  # else its container has not begun yet
            if error.by_rights:
                raise
    return merged(written)


def writer(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return f"worker-{labels[WORKER_LABEL]}" if WORKER_LABEL in labels else str(Role.MASTER)


class LogReaders:
    """All lines that are there and come, until the job has ended: a thread for each pod that was found.

    A log that ends while its pod goes on, as when the API server is started again, is read anew from where it ended.
    """

    def __init__(self, job: SourceJob, worker: int | None) -> None:
        self._job = job
        self._worker = worker
        self._readers: dict[str, threading.Thread] = {}  # the newest of each pod, by its uid
        self._told: collections.Counter[str] = collections.Counter()  # lines, in the same way
        self._whole: set[str] = set()  # read to the end
        self._open: set[urllib3.BaseHTTPResponse] = set()

    def run(self, stream: ThreadLines) -> None:
        while not (stream.stopped.is_set() or self._look(stream)):
            stream.stopped.wait(LOOK_SECONDS)
        self._join()
        if not stream.stopped.is_set():
            self._look(stream)  # at those that broke off meanwhile
            self._join()

    def _look(self, stream: ThreadLines) -> bool:
        """Take up what is to be read; whether the job has ended, asked first, so that no pod is missed."""
        ended = False
        with contextlib.suppress(ElasticDLError):
            ended = self._job.has_ended()
            for pod in find_pods(self._job.client, self._job.name, self._worker):
                self._take_up(pod, stream)
        return ended

    def _join(self) -> None:
        for thread in self._readers.values():
            thread.join(JOIN_SECONDS)

    def close(self) -> None:
        for response in tuple(self._open):
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
                response.shutdown()

    def _take_up(self, pod: Object, stream: ThreadLines) -> None:
        uid = pod["metadata"]["uid"]
        begun = any("waiting" not in each["state"] for each in pod.get("status", {}).get("containerStatuses") or ())
        reader = self._readers.get(uid)
        if begun and uid not in self._whole and not (reader and reader.is_alive()):
            thread = threading.Thread(target=self._read, args=(pod, stream), name=f"log {uid}", daemon=True)
            self._readers[uid] = thread
            thread.start()

    def _read(self, pod: Object, stream: ThreadLines) -> None:
        start, uid = _prefix(pod, self._worker), pod["metadata"]["uid"]
        with contextlib.suppress(ElasticDLError, urllib3.exceptions.HTTPError, OSError, ValueError):
            response = self._job.client.log(pod["metadata"]["name"], follow=True)
            self._open.add(response)
            with contextlib.closing(response):
                for line in itertools.islice(_lines(response), self._told[uid], None):
                    stream.put(start + line)
                    self._told[uid] += 1
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                self._whole.add(uid)


def _prefix(pod: Object, worker: int | None) -> str:
    return prefix(writer(pod), None if worker is None else writer(pod))


def _text(client: Client, pod: Object) -> str:
    name = pod["metadata"]["name"]
    with contextlib.closing(client.log(name)) as response:
        try:
            return bytes(response.data).decode(errors="replace")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"the log of {name} broke off: {error}") from error


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[str]:
    rest = b""
    for chunk in response.stream(amt=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
