"""Following a job to its end, on a screen: what happens in it, its statuses, what its workers print, and how it ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from elasticdl.cli.job_handle import AbsentError, Following, Heard, JobHandle
from elasticdl.cli.printed import Prints
from elasticdl.cli.screens import (
    Once,
    Screen,
    is_over,
    kept_text,
    open_screen,
    own_outlets,
    reasons_of,
    summary_lines,
    tell,
)
from elasticdl.cli.signals import SignalLog, caught
from elasticdl.common.errors import JobFailedError, UnreachableError
from elasticdl.job.facts import Facts
from elasticdl.job.journal import KINDS, Entry, news, parse_entry
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

Watch = Callable[[Heard | None], object]
UNREACHED_SECONDS = 10.0  # a master that has just been started takes some of them to listen


@dataclass(frozen=True, slots=True)
class Follower:
    """Who follows a job, and what they do about it: by default nothing, as somebody who looks at a job that others have started.

    Attributes:
        prints: Shows what the workers print.
        watch: Makes what looks after the master. That is called with each thing that has come and, whenever nothing has come for a
            moment, with None.
        patient: The job's end is waited for also by who may not hear of it before.
        farewell: What is said when a signal ends the following, as the job goes on. None: a signal does not end the following.
        at_end: Called when nothing more comes, while it is still shown what the workers print.
        lost: Called if the job is lost.
    """

    prints: Callable[[Screen], Prints] = lambda screen: Prints((), screen, None)
    watch: Callable[[Screen, Following], Watch] = lambda screen, following: lambda heard: None
    patient: bool = False
    farewell: str | None = ""
    at_end: Callable[[], object] = lambda: None
    lost: Callable[[], None] = lambda: None


def follow(job: JobHandle, spec: JobSpec, follower: Follower = Follower(), signals: SignalLog | None = None) -> int:
    """Until the job is over; returns the exit code. ``signals``: what the caller notes, in the main thread.

    Raises:
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: a signal has ended the following, or the job.
    """
    noted, last = signals or SignalLog(), pb.JobStatus()
    with (
        caught(noted.add) if signals is None else nullcontext(),
        open_screen(spec.log_loss_steps, own_outlets()) as screen,
        follower.prints(screen).shown(wait=lambda: not noted.take()) as prints,
        job.following(statuses=True, patient=follower.patient) as following,
    ):
        silence, watch, once = Silence(job, screen), follower.watch(screen, following), Once()
        for heard in following:
            if isinstance(heard, pb.JobStatus):
                last = heard
                screen.show(heard)
            elif heard:
                show_entry(heard, screen, once, prints.hear)
            silence.hear(heard, following.failure, time.monotonic())
            watch(heard)
            if follower.farewell is not None and noted.first is not None:
                break
        follower.at_end()
    if follower.farewell is not None and noted.first is not None:
        if follower.farewell:
            tell(follower.farewell)
        noted.raise_first()
    status = job.status()
    if status.phase == "lost" and is_over(last):
        status = last  # its master told the end and could not write it down, as on a full disk
    if status.phase == "lost":
        follower.lost()
    # The user's traceback, if that was the cause, and a worker has not just printed it.
    if status.phase == "failed" and status.traceback and not prints.has_shown(status.traceback.strip()):
        tell(status.traceback.rstrip())
    facts = Facts().read(job.journal()).conclude()
    kept = kept_text(status, facts, on_cluster=bool(job.namespace))
    if status.phase in ("succeeded", "stopped"):
        tell("\n".join(summary_lines(status, facts, spec.output, kept)))
    if status.phase == "stopped":
        noted.raise_first()
        raise JobFailedError(f"job {job.name} was stopped{f' ({status.reason})' if status.reason else ''}")
    if status.phase != "succeeded":
        if kept:
            tell(kept)
        where = job.where_logs()
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}{where and f'; all logs: {where}'}")
    return 0


class Silence:
    """Tells why nothing is heard of a job's master, each reason once, and that it is heard again."""

    def __init__(self, job: JobHandle, screen: Screen) -> None:
        self._job = job
        self._screen = screen
        self._told: set[str] = set()
        self._unreached = math.inf  # since when it runs and does not answer
        self._is_unreached = False  # and that was told

    def hear(self, heard: Heard | None, failure: Exception | None, now: float) -> None:
        """``failure``: why no status is heard at the moment."""
        if isinstance(heard, pb.JobStatus):
            if self._is_unreached:
                self._screen.line("its master is reached again")
            self._told, self._unreached, self._is_unreached = set(), math.inf, False
        elif heard is None and isinstance(failure, AbsentError):
            self._unreached = math.inf
            self._tell(str(failure))
        elif heard is None and failure is not None:
            self._unreached = min(self._unreached, now)
            if now - self._unreached >= UNREACHED_SECONDS:
                self._tell(f"its master can't be reached: {failure}; it is tried again")

    def _tell(self, why: str) -> None:
        if why in self._told:
            return
        self._told.add(why)
        over = ""
        with suppress(UnreachableError):  # that the cluster does not answer may be the very thing to tell
            over = self._job.over()
        if not over:  # else how it ended is told at the end
            self._is_unreached = self._is_unreached or self._unreached < math.inf
            self._screen.line(why)


def show_entry(line: str, screen: Screen, once: Once, hear: Callable[[Entry], object]) -> None:
    """``hear``: is told the entry.

    Who follows a job of this machine keeps it alive: an entry that is damaged, or made up, must not end the training.
    """
    entry = parse_entry(line)
    if entry is None:
        return
    with suppress(Exception):
        text = news(entry)
        if text is not None and KINDS[entry["event"]].passing:
            screen.passing(entry["event"], text)
        elif text is not None:
            screen.line(once(text, *reasons_of(entry)))
    with suppress(Exception):
        hear(entry)
