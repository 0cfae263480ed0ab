"""The logs of a job's pods, as far as the pods are still there: those that were deleted have taken theirs along."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import urllib3

from elasticdl.cli.kubernetes.text import Stream
from elasticdl.cli.log_reader import in_order, merged, prefix
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.kubernetes.api_error import NotDoneError
from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.job_pods import find_pods
from elasticdl.kubernetes.manifests.names import WORKER_LABEL, Role

if TYPE_CHECKING:
    from elasticdl.cli.kubernetes.job import ClusterJob

LOOK_SECONDS = 2.0  # between two looks for further pods
JOIN_SECONDS = 5.0


def read_logs(cluster: Client, job: str, worker: int | None) -> list[str]:
    """What there is, in the order of time as far as the lines tell it.

    Raises:
        UserError: there is no such worker.
    """
    pods = find_pods(cluster, job, worker)
    if worker is not None and not pods:
        names = ", ".join(in_order(iter({writer(pod) for pod in find_pods(cluster, job, None)}))) or "nobody"
        raise UserError(f"job {job} has no worker {worker}; it has logs of {names}")
    written: dict[str, list[str]] = {}
    for pod in pods:
        lines = written.setdefault(_prefix(pod, worker), [])
        try:
            lines += _text(cluster, pod).splitlines()
        except NotDoneError as error:  # else its container has not begun yet
            if error.by_rights:
                raise
    return merged(written)


def writer(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return f"worker-{labels[WORKER_LABEL]}" if WORKER_LABEL in labels else str(Role.MASTER)


@contextmanager
def followed_logs(job: ClusterJob, worker: int | None) -> Iterator[Stream]:
    """All lines that are there and come, until the job has ended."""
    find_pods(job.cluster, job.name, worker)  # who may not is told now
    following = _Following(job, worker)
    stream = Stream("logs", following.run)
    stream.start()
    try:
        yield stream
    finally:
        stream.stopped.set()
        following.close()
        stream.stop(JOIN_SECONDS)


class _Following:
    """A thread that looks for pods, and one for each pod that was found.

    A log that ends while its pod goes on, as when the API server is started again, is read anew from where it ended.
    """

    def __init__(self, job: ClusterJob, worker: int | None) -> None:
        self._job = job
        self._worker = worker
        self._readers: dict[str, threading.Thread] = {}  # the newest of each pod, by its uid
        self._told: collections.Counter[str] = collections.Counter()  # lines, in the same way
        self._whole: set[str] = set()  # read to the end
        self._open: set[urllib3.BaseHTTPResponse] = set()

    def run(self, stream: Stream) -> None:
        while not (stream.stopped.is_set() or self._look(stream)):
            stream.stopped.wait(LOOK_SECONDS)
        self._join()
        if not stream.stopped.is_set():
            self._look(stream)  # at those that broke off meanwhile
            self._join()

    def _look(self, stream: Stream) -> bool:
        """Take up what is to be read; whether the job has ended, asked first, so that no pod is missed."""
        ended = False
        with contextlib.suppress(ElasticDLError):
            ended = self._job.has_ended()
            for pod in find_pods(self._job.cluster, self._job.name, self._worker):
                self._take_up(pod, stream)
        return ended

    def _join(self) -> None:
        for thread in self._readers.values():
            thread.join(JOIN_SECONDS)

    def close(self) -> None:
        for response in tuple(self._open):
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
                response.shutdown()

    def _take_up(self, pod: Object, stream: Stream) -> None:
        uid = pod["metadata"]["uid"]
        begun = any("waiting" not in each["state"] for each in pod.get("status", {}).get("containerStatuses") or ())
        reader = self._readers.get(uid)
        if begun and uid not in self._whole and not (reader and reader.is_alive()):
            thread = threading.Thread(target=self._read, args=(pod, stream), name=f"log {uid}", daemon=True)
            self._readers[uid] = thread
            thread.start()

    def _read(self, pod: Object, stream: Stream) -> None:
        start, uid = _prefix(pod, self._worker), pod["metadata"]["uid"]
        with contextlib.suppress(ElasticDLError, urllib3.exceptions.HTTPError, OSError, ValueError):
            response = self._job.cluster.log(pod["metadata"]["name"], follow=True)
            self._open.add(response)
            with contextlib.closing(response):
                for line in itertools.islice(_lines(response), self._told[uid], None):
                    stream.put(start + line)
                    self._told[uid] += 1
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                self._whole.add(uid)


def _prefix(pod: Object, worker: int | None) -> str:
    return prefix(writer(pod), None if worker is None else writer(pod))


def _text(cluster: Client, pod: Object) -> str:
    name = pod["metadata"]["name"]
    with contextlib.closing(cluster.log(name)) as response:
        try:
            return bytes(response.data).decode(errors="replace")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"the log of {name} broke off: {' '.join(str(error).split())}") from error


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[str]:
    rest = b""
    for chunk in response.stream(amt=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
