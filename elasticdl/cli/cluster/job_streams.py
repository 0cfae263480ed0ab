"""The journal and the logs of a job on a cluster, as far as they can still be had, and as they come."""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator

import urllib3

from elasticdl.cli.job_handle import Lines
from elasticdl.cli.wording import by_writer, merged, prefix
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.common.journal import parse_entry
from elasticdl.kubernetes.api_error import NotDoneError
from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.job_pods import find_pods
from elasticdl.kubernetes.manifests.names import WORKER_LABEL, Role

LOOK_SECONDS = 2.0  # between two looks for further pods
JOIN_SECONDS = 5.0
_BROKEN_OFF = (ElasticDLError, urllib3.exceptions.HTTPError, OSError, ValueError)


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
        is_full = len(self._lines) == self._lines.maxlen
        if line in self._known or (is_full and _time(line) < _time(self._lines[0])):
            return False
        if is_full:
            self._known.discard(self._lines[0])
        self._lines.append(line)
        self._known.add(line)
        return True


def _time(line: str) -> float:
    entry = parse_entry(line)
    return float(entry["time"]) if entry else 0.0


def read_logs(client: Client, job: str, worker: int | None) -> Lines:
    """What there is, in the order of time as far as the lines tell it.

    Raises:
        UserError: there is no such worker.
    """
    pods = find_pods(client, job, worker)
    if worker is not None and not pods:
        names = ", ".join(by_writer({_writer(pod) for pod in find_pods(client, job, None)})) or "nobody"
        raise UserError(f"job {job} has no worker {worker}; it has logs of {names}")
    written: dict[str, list[str]] = {}
    for pod in pods:
        lines, name = written.setdefault(_prefix(pod, worker), []), pod["metadata"]["name"]
        try:
            with contextlib.closing(client.log(name)) as response:
                lines += bytes(response.data).decode(errors="replace").splitlines()
        except NotDoneError as error:  # else its container has not begun yet
            if error.by_rights:
                raise
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"the log of {name} broke off: {error}") from error
    yield from merged(written)


def follow_logs(client: Client, job: str, worker: int | None, has_ended: Callable[[], bool]) -> Lines:
    """All lines that are there and come, until the job has ended."""
    find_pods(client, job, worker)  # who may not is told now
    with contextlib.closing(_LogReaders(client, worker)) as readers:
        ended = False
        while not ended:
            with contextlib.suppress(ElasticDLError):
                ended = has_ended()  # asked first, so that no pod is missed
                readers.take_up(find_pods(client, job, worker))
            yield from readers.lines(0.0 if ended else LOOK_SECONDS)
        readers.join()
        with contextlib.suppress(ElasticDLError):
            readers.take_up(find_pods(client, job, worker))  # those that broke off meanwhile
        readers.join()
        yield from readers.lines(0.0)


class _LogReaders:
    """A thread for each pod that was found.

    A log that ends while its pod goes on, as when the API server is started again, is read anew from where it ended.
    """

    def __init__(self, client: Client, worker: int | None) -> None:
        self._client = client
        self._worker = worker
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}  # the newest of each pod, by its uid
        self._told: collections.Counter[str] = collections.Counter()  # lines, in the same way
        self._whole: set[str] = set()  # read to the end
        self._open: set[urllib3.BaseHTTPResponse] = set()

    def lines(self, seconds: float) -> Iterator[str]:
        """What comes in that time, and is there at its end."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get(timeout=max(0.0, end - time.monotonic()))

    def take_up(self, pods: list[Object]) -> None:
        for pod in pods:
            uid, states = pod["metadata"]["uid"], pod.get("status", {}).get("containerStatuses") or ()
            begun = any("waiting" not in each["state"] for each in states)
            before = self._threads.get(uid)
            if begun and uid not in self._whole and not (before and before.is_alive()):
                thread = threading.Thread(target=self._read, args=(pod,), name=f"log {uid}", daemon=True)
                self._threads[uid] = thread
                thread.start()

    def join(self) -> None:
        for thread in self._threads.values():
            thread.join(JOIN_SECONDS)

    def close(self) -> None:
        for response in tuple(self._open):
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
                response.shutdown()

    def _read(self, pod: Object) -> None:
        start, uid = _prefix(pod, self._worker), pod["metadata"]["uid"]
        with contextlib.suppress(*_BROKEN_OFF):
            response = self._client.log(pod["metadata"]["name"], follow=True)
            self._open.add(response)
            with contextlib.closing(response):
                for line in itertools.islice(_lines(response), self._told[uid], None):
                    self._inbox.put(start + line)
                    self._told[uid] += 1
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                self._whole.add(uid)


def _writer(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return f"worker-{labels[WORKER_LABEL]}" if WORKER_LABEL in labels else str(Role.MASTER)


def _prefix(pod: Object, worker: int | None) -> str:
    return prefix(_writer(pod)) if worker is None else ""


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[str]:
    rest = b""
    for chunk in response.stream(amt=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
