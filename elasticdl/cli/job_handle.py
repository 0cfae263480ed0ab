"""A job as the commands see it, wherever it runs: on this machine (`local`) or on a cluster (`cluster`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.parsing import did_you_mean
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

Lines: TypeAlias = Generator[str, None, None]  # as they come; to be closed


class JournalFeed(Protocol):
    """A journal as it grows, to be closed. No method waits, or raises."""

    def read(self) -> tuple[bool, list[str]]:
        """What has come since the last call, a part of it if it is much; and whether the journal begins anew with it."""

    def close(self) -> None: ...


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

    def journal(self, *, follow: bool) -> Lines: ...

    def feed(self) -> JournalFeed:
        """Its journal as it grows, for somebody who must not wait."""

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        """Of the master and all workers, each line under its writer's name, or of one worker as it wrote it."""

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        """The status with which it ended; None if it has not said how it ended.

        Raises:
            UnreachableError: it has not ended by then.
        """


def described(job: str, phase: str, reason: str) -> pb.JobStatus:
    """The status of a job that has not told any."""
    return pb.JobStatus(job_name=job, phase=phase, reason=reason, time_left=-1)


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


def wait_for_end(job: str, has_ended: Callable[[], bool], timeout: float, poll: float, flags: str = "") -> None:
    """Of a job that was told to end. Raises as `JobHandle.wait_until_over`."""
    deadline = time.monotonic() + timeout
    while not has_ended():
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"job {job} has not ended {timeout:.0f} s after it was told to; "
                f"`elasticdl stop {job}{flags} --now` ends it at once"
            )
        time.sleep(poll)


_ATTEMPTS = 20
ADJECTIVES = (
    "amber", "bold", "brave", "bright", "brisk", "calm", "clever", "cosy", "eager", "fair", "gentle", "golden",
    "happy", "keen", "kind", "lively", "lucky", "mellow", "merry", "mighty", "nimble", "noble", "patient", "proud",
    "quick", "quiet", "silver", "steady", "sunny", "swift", "tidy", "warm", "wise", "witty", "young", "zesty",
)  # fmt: skip
ANIMALS = (
    "badger", "bear", "beaver", "bison", "crane", "deer", "dolphin", "eagle", "falcon", "ferret", "finch", "fox",
    "gecko", "hare", "hawk", "heron", "ibex", "koala", "lark", "lemur", "lion", "lynx", "marten", "moose",
    "newt", "otter", "owl", "panda", "puffin", "raven", "robin", "seal", "stoat", "swan", "tiger", "wren",
)  # fmt: skip


def made_up_name(is_taken: Callable[[str], bool]) -> str:
    """As ``brave-otter-42``: easy to say, to type and to tell from another."""
    rng = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        name = f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}-{rng.randrange(10, 100)}"
        if not is_taken(name):
            return name
    return f"job-{rng.randrange(10**9)}"
