"""What the dashboard shows: read by threads of its own, so that whoever asks has an answer at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elasticdl.cli import wording
from elasticdl.cli.job_handle import JobHandle, JournalFeed
from elasticdl.common.errors import ElasticDLError
from elasticdl.history.job_history import JobHistory
from elasticdl.history.records import History
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report.live_server import News, job_path
from elasticdl.report.page_data import as_json, page_data

LOOK_SECONDS = 1.0
JOIN_SECONDS = 30.0  # more than a call to a master takes at most
ASKED_SECONDS = 120.0  # what nobody has asked for so long is not read any more
LIST_SHARE = 0.2  # of the time, at most, is spent on asking for jobs
# A page is drawn anew when time has passed, too: when the job has become longer by a 300th, or by so many seconds.
REDRAWN = 300
STALE_SECONDS = 10.0
ENOUGH = 1000  # lines that are read at once: there may be more
Key = tuple[str, str]  # namespace and name
Known = tuple[JobHandle, pb.JobStatus]


@dataclass(slots=True)
class _Watched:
    """A job whose page is open."""

    handle: JobHandle
    feed: JournalFeed
    asked_at: float
    history: JobHistory = field(default_factory=JobHistory)
    lines: int = 0
    news: News | None = None


class LiveBoard:
    """See `elasticdl.report.live_server.Board`. ``list_jobs`` is given whom to tell what is missing.

    ``clock``: seconds since the epoch.
    """

    def __init__(
        self,
        list_jobs: Callable[[Callable[[str], None]], Sequence[JobHandle]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._list = list_jobs
        self._clock = clock
        self._jobs: dict[Key, Known] = {}
        self._overview: News | None = None
        self._watched: dict[Key, _Watched] = {}
        self._asked_at = clock()
        self._asked: set[Key] = set()
        self._woken = threading.Event()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._keep_list, self._keep_pages)]
        for thread in self._threads:
            thread.start()

    # ---- what the server asks ----

    def overview(self) -> News | None:
        self._asked_at = self._clock()
        return self._overview

    def job(self, namespace: str, name: str) -> News | None:
        self._asked_at = self._clock()
        key = (namespace, name)
        if self._overview is None:
            return None
        if key not in self._jobs:
            raise KeyError(name)
        watched = self._watched.get(key)
        if watched is None:
            self._asked.add(key)
            self._woken.set()
            return None
        watched.asked_at = self._asked_at
        return watched.news

    def close(self) -> None:
        """The threads end, and what was open is closed."""
        self._over.set()
        self._woken.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        for watched in self._watched.values():
            watched.feed.close()

    # ---- the list of jobs, in one thread ----

    def _keep_list(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            if self._overview is None or self._clock() - self._asked_at < ASKED_SECONDS:
                self._refresh_list()
            took = time.monotonic() - began
            self._over.wait(max(2 * LOOK_SECONDS, took / LIST_SHARE))

    def _refresh_list(self) -> None:
        """Jobs of a cluster that does not answer stay as they were: their pages may be open."""
        missing: list[str] = []
        try:
            handles = self._list(missing.append)
            kept = {key: job for key, job in self._jobs.items() if missing and key[0]}
        except (ElasticDLError, OSError) as error:
            missing, handles, kept = [str(error)], [], self._jobs
        jobs: dict[Key, Known] = {}
        for handle in handles:
            if self._over.is_set():
                return
            jobs[handle.namespace, handle.name] = handle, _status(handle)
        jobs = {**jobs, **{key: job for key, job in kept.items() if key not in jobs}}
        self._jobs = jobs
        content = as_json([_row(key, status) for key, (_, status) in jobs.items()])
        notice = as_json("; ".join(missing))
        self._overview = News(content, str(hash((content, notice))), notice=notice)

    # ---- journals of jobs, in the other ----

    def _keep_pages(self) -> None:
        while not self._over.is_set():
            more = False
            for key in tuple(self._asked):
                self._asked.discard(key)
                handle, _ = self._jobs.get(key, (None, None))  # in one look, as the list may change
                if handle is not None and key not in self._watched:
                    self._watched[key] = _Watched(handle, handle.feed(), self._clock(), JobHistory(handle.name))
            for key, watched in tuple(self._watched.items()):
                if self._clock() - watched.asked_at > ASKED_SECONDS:
                    del self._watched[key]
                    watched.feed.close()
                else:
                    more |= self._refresh(key, watched)
            self._woken.wait(0 if more else LOOK_SECONDS)
            self._woken.clear()

    def _refresh(self, key: Key, watched: _Watched) -> bool:
        """Whether there may be more to read at once."""
        anew, lines = watched.feed.read()
        if anew:
            watched.history, watched.lines = JobHistory(watched.handle.name), 0
        watched.history.read(lines)
        watched.lines += len(lines)
        _, status = self._jobs.get(key, (None, None))
        if len(lines) < ENOUGH:
            watched.news = self._page(watched, status)
        return len(lines) >= ENOUGH

    def _page(self, watched: _Watched, status: pb.JobStatus | None) -> News:
        history = known(watched.history, status, self._clock())
        revision = f"{watched.lines}-{_drawn(history.until - history.began)}-{history.phase}"
        if watched.news is not None and watched.news.revision == revision:
            return watched.news
        return News(as_json(page_data(history)), revision, over=history.over)


def _drawn(age: float) -> int:
    """Another number whenever a page of a job of this age is to be drawn anew."""
    steady = REDRAWN * STALE_SECONDS  # from this age on the seconds are less than the part
    return int(REDRAWN * math.log(max(1.0, min(age, steady))) + max(0.0, age - steady) / STALE_SECONDS)


def known(history: JobHistory, status: pb.JobStatus | None, now: float) -> History:
    """With what the job's status says of a job that has not told its end."""
    found = history.result()
    if found.over or status is None:
        return found
    if status.phase in ("starting", "pending", "running", "waiting", "stopping"):
        found = _trained(history.result(now), status)
        if found.phase not in ("pending", status.phase):  # the journal is the newer one
            return found
    return replace(found, phase=status.phase, reason=status.reason, over=wording.is_over(status))


def _trained(found: History, status: pb.JobStatus) -> History:
    """With the step of the status if the journal does not tell it yet: that of a long job tells steps late.

    Steps go back only as a new world begins, which the journal tells at once: a status of the world before is older.
    """
    world = found.worlds[-1].version if found.worlds else 0
    if status.step <= found.step or status.world_version < world:
        return found
    loss = status.loss if status.samples and math.isfinite(status.loss) else None
    rate = status.samples_per_second if math.isfinite(status.samples_per_second) else None
    return replace(found, step=status.step, loss=loss, rate=rate)


def _status(handle: JobHandle) -> pb.JobStatus:
    try:
        return handle.status()
    except Exception as error:  # noqa: BLE001 - a job that has just gone, or has damaged files, must not end the list
        return pb.JobStatus(phase="unreachable", reason=str(error), time_left=-1)


def _row(key: Key, status: pb.JobStatus) -> dict[str, str]:
    namespace, name = key
    goes_on = status.max_workers and not wording.is_over(status)
    return {
        "name": name,
        "namespace": namespace,
        "page": job_path(namespace, name),
        "phase": status.phase,
        "workers": f"{len(wording.members(status))} of {wording.wanted_workers(status)}" if goes_on else "",
        "step": wording.count_of(status.step, status.total_steps),
        "elapsed": wording.duration(status.elapsed),
        "reason": status.reason,
    }
