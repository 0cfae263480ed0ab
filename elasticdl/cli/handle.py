"""A job as the commands see it, wherever it runs: on this machine (`local_job`) or on a cluster (`kubernetes.job`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from elasticdl.cli.client import MasterClient
from elasticdl.common.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb


class Growing(Protocol):
    """Text that a job writes."""

    def lines(self) -> list[str]:
        """Whole lines that have come since the last look, without their ends."""

    def may_grow(self) -> bool: ...

    def last_words(self) -> list[str]:
        """Unfinished last lines, once nothing more can come."""


class JobHandle(Protocol):
    """Every method raises UserError for what makes no sense now, and UnreachableError if nobody answers."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str:
        """Of a cluster; empty for a job of this machine."""

    @property
    def whereabouts(self) -> str:
        """Where its traces are, for a person."""

    def spec(self) -> JobSpec: ...

    def status(self) -> pb.JobStatus:
        """From its master while that runs, else what has been kept of it."""

    def client(self) -> AbstractContextManager[MasterClient]:
        """Of its master, which must run."""

    def journal(self, *, follow: bool) -> AbstractContextManager[Growing]: ...

    def logs(self, worker: int | None, *, follow: bool) -> AbstractContextManager[Growing]:
        """Of the master and all workers, each line under its writer's name, or of one worker as it wrote it."""

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        """The status with which it ended; None if it ended without a word.

        Raises:
            UnreachableError: it has not ended by then.
        """
