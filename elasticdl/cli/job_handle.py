"""A job as the commands see it, wherever it is: from its master while that runs, else from what it has left."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import ClassVar, Protocol, TypeAlias, TypeVar

from google.protobuf import json_format
from pydantic import ValidationError

from elasticdl.cli.parsing import did_you_mean
from elasticdl.cli.screens import is_over
from elasticdl.common.channel import NO_HANDSHAKE, grpc, in_words, metadata, open_channel
from elasticdl.common.credentials import Endpoint
from elasticdl.common.errors import ElasticDLError, RefusedError, UnreachableError, UserError, first_finding
from elasticdl.common.reason import flat
from elasticdl.job.journal import number_of
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as rpc

# A client of one master: every call has a deadline, and a failed one is an error of this project.


CALL_TIMEOUT = 20.0  # seconds; the master answers from memory, but on a busy cluster the way to it takes its time

# What the master refuses with a reason that is meant for the person.
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
# What it refuses because of who asks.
STRANGERS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

Reply = TypeVar("Reply")


class MasterClient:
    """The calls of the command line."""

    def __init__(self, channel: grpc.Channel, master: Endpoint) -> None:
        self._channel = channel
        self._stub = rpc.MasterStub(channel)
        self._master = master
        self._metadata = metadata(master.credentials)

    def status(self) -> pb.JobStatus:
        status: pb.JobStatus = self._call(self._stub.Status, pb.StatusRequest())
        return status

    def scale(self, workers: WorkerRange) -> str:
        """Returns what the master says about it."""
        request = pb.ScaleRequest(min_workers=workers.minimum, max_workers=workers.maximum)
        reply: pb.ScaleReply = self._call(self._stub.Scale, request)
        return reply.message

    def stop(self, reason: str, checkpoint: bool = True, now: bool = False) -> None:
        self._call(self._stub.Stop, pb.StopRequest(reason=reason, checkpoint=checkpoint, now=now))

    def watch(self) -> Iterator[pb.JobStatus]:
        """The status now and after each change, until the job has ended."""
        with self._translated():
            yield from self._stub.Watch(pb.StatusRequest(), metadata=self._metadata)

    def events(self, after: int = 0, *, follow: bool) -> Iterator[str]:
        """The lines of the journal so far and, when following, those to come until the job has ended; ``after``: of greater numbers."""
        timeout = None if follow else CALL_TIMEOUT
        request = pb.EventsRequest(follow=follow, after=after)
        with self._translated():
            for entry in self._stub.Events(request, metadata=self._metadata, timeout=timeout):
                yield entry.json

    def close(self) -> None:
        """Streams that still run end with UnreachableError."""
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: object) -> Reply:
        with self._translated():
            return method(request, metadata=self._metadata, timeout=CALL_TIMEOUT)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in REFUSALS:
                raise UserError(details) from error
            if code in STRANGERS:
                raise RefusedError(f"{self._master.title} refused: {details}") from error
            if code is grpc.StatusCode.UNAVAILABLE:
                words = in_words(details or "")
                kind = RefusedError if words == NO_HANDSHAKE else UnreachableError
                raise kind(f"{self._master.title} is not reached: {words}") from error
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnreachableError(
                    f"{self._master.title} did not answer in {CALL_TIMEOUT:g} s; it may have done what it was asked for"
                ) from error
            raise UnreachableError(f"{self._master.title} did not answer: {code.name.lower()}: {details}") from error


FOLLOW_POLL = 0.05
AGAIN_SECONDS = 1.0  # before a master is asked once more
REFUSED_SECONDS = (
    8.0  # for which a right may be missing, as while a job is being deleted; less than a silence may last untold
)
JOIN_SECONDS = 5.0  # for streams to end by themselves, and for those that were closed
KEPT_TRIES = 60  # for what is kept, as a cluster may just then not answer
Heard: TypeAlias = str | pb.JobStatus  # a line of the journal, or a status


class Following:
    """Iterates over what comes of a job, until it is over: each entry of its journal once, and its statuses beside, if they are asked
    for. None whenever nothing has come for a moment.

    A thread for each reads what masters tell, through any change of masters. That may be lost with a master, or break off on its way.
    So at the end comes what was kept: the rest of the journal, and the last status.
    """

    def __init__(self, job: JobHandle, *, statuses: bool) -> None:
        """``statuses``: its end is waited for also by who may not hear of it before, as who is shown them is told why none comes."""
        self._statuses = statuses
        self._refusal: UserError | None = None  # why nothing will be heard
        self.failure: Exception | None = None  # why no status is heard at the moment
        self._job = job
        self._inbox: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()  # None: a stream has ended
        self._is_over = threading.Event()
        self._is_left = threading.Event()
        self._number = 0  # of the newest entry
        self._masters: list[MasterClient] = []  # that are read
        reads = (self._read_entries, self._read_statuses)[: 1 + statuses]
        self._threads = [threading.Thread(target=self._run, args=(read,), name="stream", daemon=True) for read in reads]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Heard | None]:
        look_at, hang_up_at = 0.0, math.inf
        while True:
            if self._refusal:
                raise self._refusal
            # Asked first: what came before that is taken.
            is_last, now = not any(thread.is_alive() for thread in self._threads), time.monotonic()
            if now >= look_at and not self._is_over.is_set():
                look_at = now + self._job.look_seconds
                with suppress(UnreachableError):  # a cluster that does not answer may do so later
                    if self._job.over():
                        self._is_over.set()
                        hang_up_at = now + JOIN_SECONDS
            if now >= hang_up_at:
                self._hang_up()
            try:
                heard = self._inbox.get(timeout=0 if is_last else FOLLOW_POLL)
            except queue.Empty:
                if is_last:
                    return
                yield None
                continue
            if heard is None:
                look_at = 0.0
            else:
                look_at = now + self._job.look_seconds
                yield heard

    def close(self) -> None:
        """What is open is closed by the time this returns, unless the network hangs."""
        self._is_left.set()
        self._is_over.set()
        self._hang_up()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _hang_up(self) -> None:
        for master in tuple(self._masters):
            master.close()

    def _run(self, read: Callable[[MasterClient | None], None]) -> None:
        refused_since = math.inf
        while not self._is_over.is_set():
            try:
                with self._job.reached() as master:
                    self._masters.append(master)
                    try:
                        if not self._is_over.is_set():  # else it may not have been closed
                            read(master)
                    finally:
                        self._masters.remove(master)
                        self._inbox.put(None)
                refused_since = math.inf
            except UserError as error:
                self._note(read, error)
                refused_since = min(refused_since, time.monotonic())
                if time.monotonic() - refused_since >= REFUSED_SECONDS and not self._statuses:
                    self._refusal = error
                    return None
            except (ElasticDLError, OSError) as error:
                self._note(read, error)
                refused_since = math.inf
            except ValueError:  # gRPC's, of a client that has just been closed
                pass
            self._is_over.wait(AGAIN_SECONDS)
        for _ in range(KEPT_TRIES):
            if self._is_left.is_set():
                return None
            try:
                return read(None)
            except (UnreachableError, OSError) as error:
                self._note(read, error)
                self._is_left.wait(AGAIN_SECONDS)
            except ElasticDLError as error:  # damaged: it will not be better
                return self._note(read, error)
        return None

    def _note(self, read: object, failure: Exception) -> None:
        if read == self._read_statuses:
            self.failure = failure

    def _read_entries(self, master: MasterClient | None) -> None:
        """``master``: None at the end, for what is kept. Each master tells what the one before it has told, and so does what is kept."""
        for line in master.events(self._number, follow=True) if master else self._job.entries(self._number):
            if (number := number_of(line)) > self._number:
                self._number = number
                self._inbox.put(line)

    def _read_statuses(self, master: MasterClient | None) -> None:
        for status in master.watch() if master else [self._job.kept_status()]:
            self.failure = None
            if status.phase:  # else none was kept
                self._inbox.put(status)


POLL = 0.5
AT_ONCE = 16  # masters that are asked at a time
Lines: TypeAlias = Generator[str, None, None]  # as they come; to be closed


class AbsentError(UnreachableError):
    """No master runs at the moment; why."""


class JobHandle(Protocol):
    """Of a job in a folder (`folder_job`), or in a namespace of a cluster (`namespace_job`).

    Every method raises UserError for what makes no sense now, and UnreachableError if nobody answers.
    """

    master_returns: ClassVar[bool] = True  # one that is gone is started again
    look_seconds: ClassVar[float]  # between two looks whether the job is over

    # ---- where it is, what is known of it without its master, and the way to that ----

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str:
        """Of a cluster; empty for a job of this machine."""
        return ""

    @property
    def whereabouts(self) -> str:
        """Where its files or objects are, for a person."""

    @property
    def flags(self) -> str:
        """To be added to a command so that it finds the job: empty, or with a space at the beginning."""
        return ""

    def spec_text(self) -> str:
        """Its specification, as JSON."""

    def status_text(self) -> str:
        """The last status that was written down, as JSON; empty if none was."""

    def stop_without_master(self, *, now: bool) -> str:
        """Stop a job that has no master at the moment; returns what became of it, empty if that takes a master."""
        return ""

    def over(self) -> str:
        """Why nothing more will come of the job; empty while something may."""

    def last_known(self) -> tuple[int, float]:
        """Of a job that is lost: its last step, and how old it was then."""

    def reach(self) -> AbstractContextManager[Endpoint]:
        """The way to its master, whichever that is at the moment.

        Raises:
            AbsentError: none runs.
        """

    def entries(self, since: int = 0) -> Iterable[str]:
        """The lines of its journal, as far as they are to be had now; of those up to the number ``since`` some may be left out."""

    def earlier_entries(self) -> Iterable[str]:
        """Those of the jobs from which its training goes on."""
        return ()

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        """Of the master and all workers, each line under its writer's name, or of one worker as it wrote it."""

    def where_logs(self) -> str:
        """Where all logs are, or the command that shows them, for a person; empty if they are gone."""

    # ---- the same for all ----

    def spec(self) -> JobSpec:
        """Options that this version has not are left out: whoever looks at a job of a newer one can do without.

        Raises:
            UserError: it makes no sense to this version.
        """
        try:
            given = json.loads(self.spec_text())
            known = {name: value for name, value in given.items() if name in JobSpec.model_fields}
            return JobSpec.from_json(json.dumps(known))
        except ValidationError as error:
            why = first_finding(error)
        except (ValueError, AttributeError, LookupError, FileNotFoundError) as error:
            why = str(error)
        raise UserError(f"job {self.name} was made by another version, or its specification is damaged: {why}")

    def kept_status(self) -> pb.JobStatus:
        """The last that was written down; without a phase if none was.

        Raises:
            ElasticDLError: it is damaged.
        """
        try:
            return json_format.Parse(self.status_text() or "{}", pb.JobStatus(), ignore_unknown_fields=True)
        except (json_format.ParseError, ValueError) as error:
            raise ElasticDLError(f"the last status of job {self.name} is damaged: {flat(error)}") from None

    def end(self) -> pb.JobStatus | None:
        """The status with which it ended, if it has said so."""
        kept = self.kept_status()
        return kept if is_over(kept) else None

    def status(self) -> pb.JobStatus:
        """From its master while that runs, else what has been kept of it."""
        kept = self.kept_status()
        if is_over(kept):
            return kept
        try:
            with self.reached() as master:
                return master.status()
        except RefusedError:
            raise
        except AbsentError as error:
            absence = str(error)
            reason = f"there is no master at the moment: {absence}"
        except UnreachableError:
            if not self.master_returns:
                raise
            reason = absence = "its master does not answer at the moment"
        lost = self.over()
        if lost and (end := self.end()):  # since the first look it may have written how it ended
            return end
        if lost or not kept.phase:
            step, age = self.last_known()  # of a job that trains while its next master waits, too
            phase = "lost" if lost else "running" if step else "starting"
            why = lost or absence
            return pb.JobStatus(job_name=self.name, phase=phase, reason=why, step=step, elapsed=age, time_left=-1)
        kept.reason = f"{reason}; showing the last saved status"
        return kept

    @contextmanager
    def reached(self) -> Iterator[MasterClient]:
        """A client of its master, whichever that is at the moment. Raises as `reach`."""
        with self.reach() as endpoint, open_channel(endpoint.address, endpoint.credentials) as channel:
            yield MasterClient(channel, endpoint)

    @contextmanager
    def master(self) -> Iterator[MasterClient]:
        """A client of its master.

        Raises:
            UserError: there is none.
        """
        try:
            with self.reached() as master:
                yield master
        except AbsentError as absence:
            end = self.end()
            if how := f"it has {end.phase}" if end else self.over():
                raise UserError(f"job {self.name} is not running: {how}") from None
            # Its workers may train on meanwhile.
            raise UserError(
                f"job {self.name} has no master at the moment: {absence}; `elasticdl status {self.name}{self.flags}` tells when it has"
                + (f"; `elasticdl delete {self.name}{self.flags}` ends it without one" if self.namespace else "")
            ) from None

    def following(self, *, statuses: bool) -> AbstractContextManager[Following]:
        """What comes of it, with its statuses or without. Without them iterating raises UserError if there is no way for this user."""
        return closing(Following(self, statuses=statuses))

    def journal(self, *, follow: bool = False) -> Lines:
        """The entries so far, and before them those of the jobs from which its training goes on. ``follow``: and each that comes, until
        the job is over."""
        yield from self.earlier_entries()
        if not follow:
            yield from self.entries()
            return
        with self.following(statuses=False) as following:
            for heard in following:
                if isinstance(heard, str):
                    yield heard

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        """Of a job that was told to end: the status with which it has; None if it has not said how.

        Raises:
            UnreachableError: it has not ended by then.
        """
        deadline = time.monotonic() + timeout
        while not self.over():
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"job {self.name} has not ended {timeout:.0f} s after it was told to; "
                    f"`elasticdl stop {self.name}{self.flags} --now` ends it at once"
                )
            time.sleep(min(POLL, self.look_seconds))
        return self.end()


def statuses_of(jobs: Sequence[JobHandle]) -> list[pb.JobStatus]:
    """In the same order. What is wrong with one job hides no other.

    Several are asked at a time, as a master that does not answer is waited for. Whoever is interrupted does not wait for the others:
    threads of a pool would be waited for as the process ends.
    """
    questions, answers = deque(enumerate(jobs)), dict[int, pb.JobStatus]()

    def work() -> None:
        with suppress(IndexError):
            while True:
                number, job = questions.popleft()
                try:
                    answers[number] = job.status()
                except Exception as error:  # noqa: BLE001 - it has just gone, or its files are damaged
                    answers[number] = pb.JobStatus(job_name=job.name, phase="unreachable", elapsed=-1, time_left=-1)
                    answers[number].reason = flat(error) or type(error).__name__

    threads = [threading.Thread(target=work, name="ask", daemon=True) for _ in jobs[:AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(POLL)  # in short waits: a signal that comes just before one has its handler called after it
    return [answers[number] for number in range(len(jobs))]


def choose(name: str | None, known: Collection[str], running: Sequence[str], where: str = "", hint: str = "") -> str:
    """The job of that name; without a name the only one that runs.

    Raises:
        UserError: there is none, or which one is meant is not clear.
    """
    if name in known:
        return str(name)
    if name is not None:
        near = did_you_mean(name, known)
        raise UserError(f"there is no job {name}{where}{f': {near}' if near else ''}{hint}")
    if len(running) == 1:
        return running[0]
    if running:
        raise UserError(f"{len(running)} jobs are running, so name one: {', '.join(running)}")
    raise UserError(f"no job is running{where}; name one to look at an old one{hint}")
