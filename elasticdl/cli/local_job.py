"""A job of this machine, as the commands see any job: from its folder, and from its master while that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elasticdl.cli.client import MasterClient, connect
from elasticdl.cli.handle import Growing
from elasticdl.cli.jobs import Life, is_alive, last_status, life_of, running_master
from elasticdl.cli.log_reader import LogReader, log_names
from elasticdl.cli.tail import Tail
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.jobdir import JobDir
from elasticdl.common.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.05


@dataclass(frozen=True, slots=True)
class LocalJob:
    """See `elasticdl.cli.handle.JobHandle`."""

    folder: JobDir

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def namespace(self) -> str:
        return ""

    @property
    def whereabouts(self) -> str:
        return f"files: {self.folder.path}"

    def spec(self) -> JobSpec:
        return JobSpec.from_json(self.folder.spec.read_text())

    def status(self) -> pb.JobStatus:
        ended = last_status(self.folder)
        if ended is not None:
            return ended
        life = life_of(self.folder, time.time())
        address = self.folder.read_master()
        if life is Life.RUNNING and address is not None:
            with connect(address) as client:
                return client.status()
        reason = "its master is gone without a word" if life is Life.LOST else "its master is starting"
        return pb.JobStatus(job_name=self.name, phase=life.value, reason=reason, time_left=-1)

    @contextmanager
    def client(self) -> Iterator[MasterClient]:
        with connect(running_master(self.folder)) as client:
            yield client

    @contextmanager
    def journal(self, *, follow: bool) -> Iterator[Growing]:
        yield _File(Tail(self.folder.journal), lambda: follow and self._goes_on())

    @contextmanager
    def logs(self, worker: int | None, *, follow: bool) -> Iterator[Growing]:
        if worker is not None and not follow and not self.folder.worker_log(worker).exists():
            names = ", ".join(log_names(self.folder))
            raise UserError(f"job {self.name} has no worker {worker}; it has logs of {names}")
        yield LogReader(self.folder, worker, lambda: follow and self._goes_on())

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        deadline, address = time.monotonic() + timeout, self.folder.read_master()
        while address and is_alive(address.pid) and not self.folder.status.exists():
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"job {self.name} has not ended {timeout:.0f} s after it was told to; "
                    f"`elasticdl stop {self.name} --now` ends it at once"
                )
            time.sleep(POLL)
        return last_status(self.folder)

    def _goes_on(self) -> bool:
        return life_of(self.folder, time.time()) in (Life.STARTING, Life.RUNNING)


@dataclass(frozen=True, slots=True)
class _File:
    tail: Tail
    grows: Callable[[], bool]

    def lines(self) -> list[str]:
        return self.tail.lines()

    def may_grow(self) -> bool:
        return self.grows()

    def last_words(self) -> list[str]:
        return []  # an entry that was cut off is none
