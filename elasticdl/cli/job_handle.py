"""A job as the commands see it, wherever it runs: on this machine (`local`) or on a cluster (`cluster`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from elasticdl.cli.line_streams import LineStream
from elasticdl.cli.master_client import MasterClient
from elasticdl.common.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb


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

    def master(self) -> AbstractContextManager[MasterClient]:
        """A client of its master, which must run."""

    def journal(self, *, follow: bool) -> AbstractContextManager[LineStream]: ...

    def logs(self, worker: int | None, *, follow: bool) -> AbstractContextManager[LineStream]:
        """Of the master and all workers, each line under its writer's name, or of one worker as it wrote it."""

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        """The status with which it ended; None if it has not said how it ended.

        Raises:
            UnreachableError: it has not ended by then.
        """


def not_ended(job: str, timeout: float, flags: str = "") -> str:
    """What is said of a job that was told to end and has not."""
    return (
        f"job {job} has not ended {timeout:.0f} s after it was told to; "
        f"`elasticdl stop {job}{flags} --now` ends it at once"
    )
