"""A job as the commands see it, wherever it is: from its master while that runs, else from what it has left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from elasticdl.cli.follow import Following
from elasticdl.cli.home import Home, JournalFeed, Lines, reached
from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.parsing import did_you_mean
from elasticdl.cli.wording import is_over
from elasticdl.common.errors import RefusedError, UnreachableError, UserError
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.5


@dataclass(frozen=True, slots=True)
class JobHandle:
    """Every method raises UserError for what makes no sense now, and UnreachableError if nobody answers."""

    home: Home

    @property
    def name(self) -> str:
        return self.home.name

    @property
    def namespace(self) -> str:
        """Of a cluster; empty for a job of this machine."""
        return self.home.namespace

    def spec(self) -> JobSpec:
        """Options that this version has not are left out: whoever looks at a job of a newer one can do without.

        Raises:
            UserError: it makes no sense to this version.
        """
        try:
            given = json.loads(self.home.spec())
            known = {name: value for name, value in given.items() if name in JobSpec.model_fields}
            return JobSpec.from_json(json.dumps(known))
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        except (ValueError, AttributeError, FileNotFoundError) as error:
            why = str(error)
        raise UserError(f"job {self.name} was made by another version, or its specification is damaged: {why}")

    def status(self) -> pb.JobStatus:
        """From its master while that runs, else what has been kept of it."""
        home = self.home
        kept = home.kept_status()
        if kept is not None and is_over(kept):
            return kept
        if lost := home.over():
            if end := self._end():  # between the two looks it may have written how it ended
                return end
            step, age = home.last_known()
            return pb.JobStatus(job_name=self.name, phase="lost", reason=lost, step=step, elapsed=age, time_left=-1)
        absence = home.absence()
        reason = f"there is no master at the moment: {absence}"
        if not absence:
            try:
                with reached(home) as master:
                    return master.status()
            except RefusedError:
                raise
            except UnreachableError:
                if not home.master_returns:
                    raise
                reason = absence = "its master does not answer at the moment"
        if kept is None:
            step, elapsed = home.last_known()  # of a job that trains while its next master waits
            phase = "running" if step else "starting"
            return pb.JobStatus(
                job_name=self.name, phase=phase, reason=absence, step=step, elapsed=elapsed, time_left=-1
            )
        kept.reason = f"{reason}; showing the last saved status"
        return kept

    @contextmanager
    def master(self) -> Iterator[MasterClient]:
        """A client of its master, which must run."""
        if absence := self.home.absence():
            end = self._end()
            how = f"it has {end.phase}" if end else self.home.over() or absence
            raise UserError(f"job {self.name} is not running: {how}")
        with reached(self.home) as master:
            yield master

    @contextmanager
    def following(self, *, statuses: bool, has_ended: Callable[[], object] | None = None) -> Iterator[Following]:
        with closing(Following(self.home, statuses=statuses, has_ended=has_ended)) as following:
            yield following

    def journal(self, *, follow: bool) -> Lines:
        """Each entry once, as a line."""
        if not follow:
            yield from self.home.journal()
            return
        with self.following(statuses=False) as following:
            for heard in following:
                if isinstance(heard, str):
                    yield heard

    def feed(self) -> JournalFeed:
        """Its journal as it grows, for somebody who must not wait."""
        return self.home.feed()

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        """Of a job that was told to end: the status with which it has; None if it has not said how.

        Raises:
            UnreachableError: it has not ended by then.
        """
        deadline = time.monotonic() + timeout
        while not self.home.over():
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"job {self.name} has not ended {timeout:.0f} s after it was told to; "
                    f"`elasticdl stop {self.name}{self.home.flags} --now` ends it at once"
                )
            time.sleep(min(POLL, self.home.look_seconds))
        return self._end()

    def _end(self) -> pb.JobStatus | None:
        """The status with which it ended, if it has said so."""
        kept = self.home.kept_status()
        return kept if kept is not None and is_over(kept) else None


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
