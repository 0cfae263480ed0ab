"""What the dashboard shows: a page is made when it is asked for, and kept for a moment."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Generic, TypeVar

from elasticdl.cli import screens
from elasticdl.cli.job_handle import JobHandle, of_each
from elasticdl.common.errors import ElasticDLError
from elasticdl.common.reason import flat
from elasticdl.job.facts import Facts
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report.live_server import News, job_path
from elasticdl.report.page import as_json, page_data

# What was made is kept for so long, or for so many times as long as making it took: a list of many jobs, or a long journal.
KEPT_SECONDS = 3.0
KEPT_TIMES = 4.0
Key = tuple[str, str]  # namespace and name
Clock = Callable[[], float]
T = TypeVar("T")


class Kept(Generic[T]):
    """Makes something when it is asked for. Whoever asks meanwhile waits for it, and whoever asks soon after is given the same."""

    def __init__(self, make: Callable[[], T], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._made: tuple[T, float] | None = None  # until when it is kept
        self._making = threading.Lock()

    def get(self) -> T:
        with self._making:
            if self._made is None or self._clock() >= self._made[1]:
                began = self._clock()
                made = self._make()
                now = self._clock()
                self._made = made, now + max(KEPT_SECONDS, KEPT_TIMES * (now - began))
            return self._made[0]


class LiveBoard:
    """See `elasticdl.report.live_server.Board`. ``list_jobs`` is given whom to tell what is missing.

    ``clock``: seconds since the epoch.
    """

    def __init__(
        self, list_jobs: Callable[[Callable[[str], None]], Sequence[JobHandle]], clock: Clock = time.time
    ) -> None:
        self._list = list_jobs
        self._clock = clock
        self._last: dict[Key, JobHandle] = {}  # of the list before
        self._jobs = Kept(self._list_jobs, clock)
        self._overview = Kept(self._make_overview, clock)
        self._pages: dict[Key, Kept[News]] = {}
        self._contents: dict[Key, str] = {}  # JSON: what the page of a job has shown last

    def overview(self) -> News:
        return self._overview.get()

    def job(self, namespace: str, name: str) -> News:
        key = (namespace, name)
        if key not in self._jobs.get()[0]:
            raise KeyError(name)
        return self._pages.setdefault(key, Kept(partial(self._make_page, key), self._clock)).get()

    def _list_jobs(self) -> tuple[dict[Key, JobHandle], str]:
        """And what is missing. Jobs of a cluster that does not answer stay as they were: their pages may be open."""
        missing: list[str] = []
        try:
            jobs = {(handle.namespace, handle.name): handle for handle in self._list(missing.append)}
            kept = {key: job for key, job in self._last.items() if missing and key[0]}
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a cluster must not end the list for good
            missing, jobs, kept = [flat(error) or type(error).__name__], {}, self._last
        self._last = jobs | {key: job for key, job in kept.items() if key not in jobs}
        for known in (self._pages, self._contents):
            for key in known.keys() - self._last.keys():
                del known[key]
        return self._last, "; ".join(missing)

    def _make_overview(self) -> News:
        jobs, missing = self._jobs.get()
        rows = zip(jobs, of_each(list(jobs.values()), _status), strict=True)
        return News(as_json([_row(key, status) for key, status in rows]), notice=missing)

    def _make_page(self, key: Key) -> News:
        """What fails is told in the page."""
        try:
            history = history_of(self._last[key], self._clock())
            content = self._contents[key] = as_json(page_data(history))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one job is told in its page
            why = flat(error) or type(error).__name__
            notice = f"This page could not be brought up to date, and is tried again: {why}"
            return News(self._contents.get(key, "null"), notice=notice)
        # A page that is over is asked for rarely: so it is only once the journal itself has told the end.
        return News(content, over=history.counts["job_finished"] > 0)


def history_of(handle: JobHandle, now: float) -> Facts:
    """What its journal tells, with what its status tells beyond that."""
    try:
        status = handle.status()  # first: of a job that is over by then the journal tells all
    except ElasticDLError:
        # The journal may be there without its master, which may just have ended, and without a status.
        status = None
    with closing(handle.journal()) as lines:
        return with_status(Facts(handle.name).read(lines), status, now)


def _status(handle: JobHandle) -> pb.JobStatus:
    try:
        return handle.status()
    except Exception as error:  # noqa: BLE001 - a job that has just gone, or has damaged files, must not end the list
        return pb.JobStatus(phase="unreachable", reason=str(error), time_left=-1)


def with_status(found: Facts, status: pb.JobStatus | None, now: float) -> Facts:
    """With what the job's status says of a job that has not told its end. ``found``: it is concluded and changed."""
    goes_on = status is not None and status.phase in ("starting", "pending", "running", "waiting", "stopping")
    found.conclude(now if goes_on else 0.0)
    if not found.counts:  # else it would have begun in 1970
        elapsed = 0.0 if status is None or not math.isfinite(status.elapsed) else status.elapsed
        found.began, found.until = now - min(max(0.0, elapsed), now), now
    if found.over or status is None:
        return found
    if goes_on:
        _take_steps(found, status)
        if found.phase not in ("pending", status.phase):  # the journal is the newer one
            return found
    found.phase, found.reason, found.over = status.phase, status.reason, screens.is_over(status)
    return found


def _take_steps(found: Facts, status: pb.JobStatus) -> None:
    """With the step of the status if the journal does not tell it yet: that of a long job tells steps late.

    Steps go back only as a new world begins, which the journal tells at once: a status of the world before is older.
    """
    world = found.worlds[-1].version if found.worlds else 0
    if status.step <= found.step or status.world_version < world:
        return
    found.step = status.step
    found.loss = status.loss if status.samples and math.isfinite(status.loss) else None
    found.rate = status.samples_per_second if math.isfinite(status.samples_per_second) else None


def _row(key: Key, status: pb.JobStatus) -> dict[str, str]:
    namespace, name = key
    return {"name": name, "namespace": namespace, "page": job_path(namespace, name), **screens.facts(status)}
