"""Where a job is: a folder of this machine (`local.folder_home`) or a namespace of a cluster (`cluster.namespace_home`)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.common.credentials import Endpoint
from elasticdl.common.errors import UnreachableError
from elasticdl.proto import elasticdl_pb2 as pb

Lines: TypeAlias = Generator[str, None, None]  # as they come; to be closed


class JournalFeed(Protocol):
    """A journal as it grows, to be closed. No method raises, and only `finish` waits."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes any more but what has not been read."""

    def read(self) -> tuple[bool, list[str]]:
        """What has come since the last call, a part of it if it is much; and whether the journal begins anew with it."""

    def finish(self) -> None:
        """The job is over: get what is left."""

    def close(self) -> None: ...


class Home(Protocol):
    """What is known of a job without its master, and the way to that. Raises UnreachableError if nobody answers."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str:
        """Of a cluster; empty for a job of this machine."""

    @property
    def whereabouts(self) -> str:
        """Where its files or objects are, for a person."""

    @property
    def flags(self) -> str:
        """To be added to a command so that it finds the job: empty, or with a space at the beginning."""

    @property
    def master_returns(self) -> bool:
        """Whether a master that is gone is started again."""

    @property
    def look_seconds(self) -> float:
        """Between two looks whether the job is over."""

    def spec(self) -> str:
        """Its specification, as JSON."""

    def kept_status(self) -> pb.JobStatus | None:
        """The last that was written down."""

    def stop_without_master(self, *, now: bool) -> str:
        """Stop a job that has no master at the moment; returns what became of it, empty if that takes a master."""

    def over(self) -> str:
        """Why nothing more will come of the job; empty while something may."""

    def absence(self) -> str:
        """Why no master runs at the moment; empty if one does."""

    def last_known(self) -> tuple[int, float]:
        """Of a job that is lost: its last step, and how old it was then."""

    def reach(self) -> AbstractContextManager[Endpoint]:
        """The way to its master, whichever that is at the moment."""

    def journal(self) -> Lines:
        """The entries so far."""

    def feed(self) -> JournalFeed: ...

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        """Of the master and all workers, each line under its writer's name, or of one worker as it wrote it."""


@contextmanager
def reached(home: Home) -> Iterator[MasterClient]:
    """A client of the job's master, whichever that is at the moment."""
    with home.reach() as endpoint, connect(endpoint) as client:
        yield client


@contextmanager
def found(home: Home) -> Iterator[MasterClient]:
    """The same, if there is a master: else nothing is tried.

    Raises:
        UnreachableError: there is none.
    """
    if absence := home.absence():
        raise UnreachableError(absence)
    with reached(home) as client:
        yield client
