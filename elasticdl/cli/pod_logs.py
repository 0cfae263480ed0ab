"""The logs of a job on a cluster, as far as they can still be had, and as they come.

Workers run in a pod one after another, so they share its log. The agent that starts them says there whose lines follow.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import urllib3

from elasticdl.cli.follow import PRINTS_POLL, Printers, Source
from elasticdl.cli.job_handle import Lines
from elasticdl.cli.screens import Stream, by_writer, prefix, tell
from elasticdl.common.credentials import Role
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.job.journal import Entry, unmarked
from elasticdl.kube.client import Client, NotDoneError, Object
from elasticdl.kube.job_pods import find_pods
from elasticdl.kube.manifests import is_over
from elasticdl.kube.names import WORKER_LABEL

LOOK_SECONDS = 2.0  # between two looks for further pods
JOIN_SECONDS = 5.0
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z) ")
# A line of an agent; where a worker was cut short, the line may begin with its last words.
_AGENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \S+ [A-Z]+ elasticdl\.places\.\w+: (.*)")
_BEGINS = re.compile(r"starting worker (\d+)$")
AT_ONCE = 32  # logs that are read at a time, where each is read to its end only
WAITING_LINES = 10_000  # that were read and not taken
READ_SECONDS = 60.0  # for a node to send something of a log
_BROKEN_OFF = (urllib3.exceptions.HTTPError, OSError, ValueError)


def read_logs(client: Client, job: str, worker: int | None, pod_name: str = "") -> Lines:
    """What there is, in the order of time, which the nodes tell of each line. A pod whose node does not answer is told of.

    Args:
        pod_name: Of that in which the worker is or was; empty if nobody knows.

    Raises:
        UserError: there is no such worker.
        UnreachableError: nothing that was asked for can be read.
    """
    all_pods = find_pods(client, job)
    its_own = _named(pod_name, all_pods) if pod_name else []
    with contextlib.closing(LogReaders(client, follow=False)) as readers:
        readers.take_up(its_own or all_pods)
        written = sorted(readers.rest(READ_SECONDS), key=lambda line: line.when)
        if readers.refusal:
            raise UserError(readers.refusal)
        failures = readers.unread.values()
    lines = [*_shown(written, worker)]
    if failures and not lines:
        raise UnreachableError("; ".join(sorted(failures)))
    if worker is None:
        for failure in failures:
            tell(failure)
    elif not (lines or its_own or worker in map(_number_of, all_pods)):  # else it may not have printed yet
        names = ", ".join(by_writer({line.writer for line in written}))
        has = f"it has logs of {names}" if names else "it has no logs yet"
        raise UserError(f"job {job} has no logs of worker {worker}; {has}")
    yield from lines


def follow_logs(
    client: Client, job: str, worker: int | None, has_ended: Callable[[], object], pod_name: str = ""
) -> Lines:
    """All lines that are there and come, until the job has ended. ``pod_name``: as of `read_logs`.

    Raises:
        UserError: the user may not read logs.
    """
    pod_name = pod_name if _named(pod_name, find_pods(client, job)) else ""  # who may not is told now
    with contextlib.closing(LogReaders(client)) as readers:
        ended, told = False, set[str]()
        while not ended:
            with contextlib.suppress(UnreachableError):
                ended = bool(has_ended())  # asked first, so that no pod is missed
                readers.take_up(_named(pod_name, find_pods(client, job)))
            yield from _shown(readers.rest() if ended else readers.lines(LOOK_SECONDS), worker)
            if readers.refusal:
                raise UserError(readers.refusal)
            for name in set(readers.unread) - told:
                tell(readers.unread[name])
                told.add(name)


def _shown(lines: Iterable[LogLine], worker: int | None) -> Iterator[str]:
    """Without marks, of one worker or of all writers."""
    for each in lines:
        text, _ = unmarked(each.text)
        if text is not None and worker in (None, _number(each.writer)):
            yield prefix(each.writer) + text if worker is None else text


def _named(name: str, pods: list[Object]) -> list[Object]:
    """Those with that name; all, if it is empty."""
    return [pod for pod in pods if not name or pod["metadata"]["name"] == name]


@dataclass(frozen=True, slots=True)
class LogLine:
    writer: str
    text: str
    when: str  # by the clock of its node; of a line that the cluster does not tell it of that of the line before


class LogReaders:
    """A thread for each pod that was found. Who takes no lines holds up the reading.

    With ``follow`` a log that ends while its pod goes on, as when the API server is started again, is read anew from where it ended.
    """

    def __init__(self, client: Client, *, follow: bool = True) -> None:
        self._client = client
        self._follow = follow
        self._turn = contextlib.nullcontext() if follow else threading.Semaphore(AT_ONCE)
        self.refusal = ""  # why a log may not be read
        self.unread: dict[str, str] = {}  # by pod: why its log could not be read
        self._inbox: queue.Queue[LogLine] = queue.Queue(WAITING_LINES)
        self._threads: dict[str, threading.Thread] = {}  # the newest of each pod, by its uid
        self._told: collections.Counter[str] = collections.Counter()  # lines, in the same way
        self._writers: dict[str, Writers] = {}  # of these lines the last
        self._whole: set[str] = set()  # read to the end
        self._open: set[urllib3.BaseHTTPResponse] = set()

    def lines(self, seconds: float) -> Iterator[LogLine]:
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

    def rest(self, patience: float = JOIN_SECONDS) -> Iterator[LogLine]:
        """Until all that are read have ended, or nothing has come for so long."""
        deadline = time.monotonic() + patience
        while any(thread.is_alive() for thread in self._threads.values()) and time.monotonic() < deadline:
            for line in self.lines(PRINTS_POLL):
                deadline = time.monotonic() + patience
                yield line
        yield from self.lines(0.0)

    def close(self) -> None:
        for response in tuple(self._open):
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
                response.shutdown()
        collections.deque(self.lines(0.0), maxlen=0)  # nobody waits any more until there is room

    def _read(self, pod: Object) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        writers, last = self._writers.setdefault(uid, Writers(pod)), ""
        try:
            with self._turn, contextlib.closing(self._client.log(name, follow=self._follow)) as response:
                self._open.add(response)
                for line in itertools.islice(response, self._told[uid], None):
                    when, text = timed(line.decode(errors="replace").removesuffix("\n"))
                    last = max(last, when)
                    self._inbox.put(LogLine(writers.of(text), text, last))
                    self._told[uid] += 1
            if is_over(pod):
                self._whole.add(uid)
        except NotDoneError as error:  # else its container has not begun yet
            self.refusal = str(error) if error.by_rights else ""
        except UnreachableError as error:
            self.unread[name] = f"the log of {name} can't be read now: {error}"
        except _BROKEN_OFF as error:
            if not self._follow:
                self.unread[name] = f"the log of {name} broke off: {error}"


def timed(line: str) -> tuple[str, str]:
    """When a line was written, and what it says; of one that the cluster has not told the time of there is none."""
    found = _TIME.match(line)
    return (found[1], line[found.end() :]) if found else ("", line)


class Writers:
    """Who has written the lines of one pod's log: the master, or workers, and between them their agent."""

    def __init__(self, pod: Object) -> None:
        number = _number_of(pod)
        self._agent = str(Role.MASTER) if number is None else f"place-{number}"
        # Of a log that is cut off at its beginning: its first worker mostly has the number of the pod.
        self._now = str(Role.MASTER) if number is None else f"worker-{number}"

    def of(self, line: str) -> str:
        """Of the next line."""
        said = _AGENT.search(line)
        if said is None:
            return self._now
        if begins := _BEGINS.match(said[1]):
            self._now = f"worker-{begins[1]}"
        return self._agent


def _number_of(pod: Object) -> int | None:
    """Of a pod for workers; None for a master's."""
    number = pod["metadata"]["labels"].get(WORKER_LABEL)
    return None if number is None else int(number)


class PodPrinters(Printers):
    """Only the pods are read in which workers are whose output is wanted."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._readers = LogReaders(client)
        self._pods: dict[int, str | None] = {}  # their names by worker; None if that is not told
        self._printed = collections.defaultdict[int, collections.deque[str]](collections.deque)  # lines by worker
        self._look_at = 0.0

    def hear(self, entry: Entry) -> None:
        if entry["event"] == "worker_started":
            self._pods = {**self._pods, entry["worker"]: entry.get("place")}

    def sources(self, worker: int) -> Mapping[Stream, Source]:
        lines = self._printed[worker]

        def taken() -> Iterator[bytes]:
            while lines:
                yield f"{lines.popleft()}\n".encode(errors="replace")

        return {Stream.OUT: taken}

    def collect(self, workers: Collection[int] | None, *, to_end: bool) -> Iterable[int]:
        if to_end or time.monotonic() >= self._look_at:
            try:
                self._find_pods(workers)
                self.trouble = self._readers.refusal
            except ElasticDLError as error:
                self.trouble = str(error)
            self._look_at = time.monotonic() + LOOK_SECONDS
        lines = self._readers.rest() if to_end else itertools.islice(self._readers.lines(0.0), WAITING_LINES)
        for line in lines:
            if (worker := _number(line.writer)) is not None:
                self._printed[worker].append(line.text)
        return self._printed.keys()

    def close(self) -> None:
        self._readers.close()

    def _find_pods(self, workers: Collection[int] | None) -> None:
        pods = [pod for pod in find_pods(self._client, self._job) if _number_of(pod) is not None]
        if workers is not None:  # of the others nothing is shown
            names = {self._pods.get(worker) for worker in workers}
            pods = [pod for pod in pods if None in names or pod["metadata"]["name"] in names]
        self._readers.take_up(pods)


def _number(writer: str) -> int | None:
    """Of a worker; None for the master and for an agent."""
    head, _, number = writer.partition("-")
    return int(number) if head == "worker" and number.isdecimal() else None
