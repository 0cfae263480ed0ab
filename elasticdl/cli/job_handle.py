"""A job as the commands see it, wherever it is: from its master while that runs, else from what it has left."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import ClassVar, Protocol, TypeAlias, TypeVar

from google.protobuf import json_format
from pydantic import ValidationError

from elasticdl.cli.follow import Following, NewLines, StreamReader
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.parsing import did_you_mean
from elasticdl.cli.wording import is_over
from elasticdl.common.credentials import Endpoint
from elasticdl.common.errors import ElasticDLError, RefusedError, UnreachableError, UserError, first_finding
from elasticdl.common.reason import flat
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.5
AT_ONCE = 16  # masters that are asked at a time
T = TypeVar("T")
Lines: TypeAlias = Generator[str, None, None]  # as they come; to be closed


class AbsentError(UnreachableError):
    """No master runs at the moment; why."""


class JobHandle(Protocol):
    """Of a job in a folder of this machine (`local.folder_job`), or in a namespace of a cluster (`cluster.namespace_job`).

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

    def status_text(self) -> str | None:
        """The last status that was written down, as JSON."""

    def stop_without_master(self, *, now: bool) -> str:
        """Stop a job that has no master at the moment; returns what became of it, empty if that takes a master."""
        return ""

    def over(self) -> str:
        """Why nothing more will come of the job; empty while something may."""

    def absence(self) -> str:
        """Why no master runs at the moment; empty if one does."""

    def last_known(self) -> tuple[int, float]:
        """Of a job that is lost: its last step, and how old it was then."""

    def reach(self) -> AbstractContextManager[Endpoint]:
        """The way to its master, whichever that is at the moment.

        Raises:
            AbsentError: none runs.
        """

    def earlier_journal(self) -> Iterable[str]:
        """Those of the jobs from which its training goes on."""
        return ()

    def kept_journal(self) -> Iterable[str]:
        """Its own, as far as it is kept without its master."""

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

    def kept_status(self) -> pb.JobStatus | None:
        """The last that was written down.

        Raises:
            ElasticDLError: it is damaged.
        """
        try:
            text = self.status_text()
            return None if text is None else json_format.Parse(text, pb.JobStatus(), ignore_unknown_fields=True)
        except (json_format.ParseError, ValueError) as error:
            raise ElasticDLError(f"the last status of job {self.name} is damaged: {flat(error)}") from None

    def end(self) -> pb.JobStatus | None:
        """The status with which it ended, if it has said so."""
        kept = self.kept_status()
        return kept if kept is not None and is_over(kept) else None

    def status(self) -> pb.JobStatus:
        """From its master while that runs, else what has been kept of it."""
        kept = self.kept_status()
        if kept is not None and is_over(kept):
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
        if lost := self.over():
            if end := self.end():  # since the first look it may have written how it ended
                return end
            step, age = self.last_known()
            return pb.JobStatus(job_name=self.name, phase="lost", reason=lost, step=step, elapsed=age, time_left=-1)
        if kept is None:
            step, elapsed = self.last_known()  # of a job that trains while its next master waits
            phase = "running" if step else "starting"
            return pb.JobStatus(
                job_name=self.name, phase=phase, reason=absence, step=step, elapsed=elapsed, time_left=-1
            )
        kept.reason = f"{reason}; showing the last saved status"
        return kept

    @contextmanager
    def reached(self) -> Iterator[MasterClient]:
        """A client of its master, whichever that is at the moment. Raises as `reach`."""
        with self.reach() as endpoint, connect(endpoint) as client:
            yield client

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

    @contextmanager
    def following(self, *, statuses: bool) -> Iterator[Following]:
        """What comes of it, with its statuses or without."""

        def kept() -> Iterable[pb.JobStatus]:
            status = self.kept_status()
            return [] if status is None else [status]

        new = NewLines()
        entries = StreamReader(
            self.reached,
            lambda client: new.of(client.events(new.number, follow=True)),
            self.over,
            lambda: new.of(self.kept_journal()),
        )
        reader = StreamReader(self.reached, lambda client: client.watch(), self.over, kept) if statuses else None
        with closing(Following(entries, reader, self.over, self.look_seconds)) as following:
            yield following

    def journal(self) -> Lines:
        """The entries so far, and before them those of the jobs from which its training goes on."""
        yield from self.earlier_journal()
        yield from self.own_journal()

    def own_journal(self) -> Iterable[str]:
        return self.kept_journal()

    def journal_to_end(self) -> Lines:
        """As `journal`, and each entry that comes, once, until the job is over."""
        yield from self.earlier_journal()
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


def of_each(jobs: Sequence[JobHandle], ask: Callable[[JobHandle], T]) -> list[T]:
    """What is answered for each, in the same order; raises what the first that fails has raised.

    Several are asked at a time, as a master that does not answer is waited for. Whoever is interrupted does not wait for the others:
    threads of a pool would be waited for as the process ends.
    """
    answers: list[Future[T]] = [Future() for _ in jobs]
    questions: queue.SimpleQueue[tuple[JobHandle, Future[T]]] = queue.SimpleQueue()
    for question in zip(jobs, answers, strict=True):
        questions.put(question)

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                job, answer = questions.get_nowait()
                try:
                    answer.set_result(ask(job))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    answer.set_exception(error)

    for _ in range(min(AT_ONCE, len(jobs))):
        threading.Thread(target=work, name="ask", daemon=True).start()

    def answered(answer: Future[T]) -> T:
        while not answer.done():
            wait([answer], POLL)  # in short waits: a signal that comes just before one has its handler called after it
        return answer.result()

    return [answered(each) for each in answers]


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
