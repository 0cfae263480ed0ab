"""What the dashboard shows: read by threads of its own, so that whoever asks has an answer at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elasticdl.cli import wording
from elasticdl.cli.follow import JournalFeed
from elasticdl.cli.job_handle import JobHandle, of_each
from elasticdl.common.reason import flat
from elasticdl.job.facts import Facts
from elasticdl.job.history import History
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
BEGIN_SECONDS = 5.0  # for a journal to tell something; after them it is taken to be empty
AGAIN_SECONDS = 30.0  # before a page that failed is tried again
ENOUGH = 1000  # lines that are read at once: there may be more
Key = tuple[str, str]  # namespace and name
Known = tuple[JobHandle, pb.JobStatus]


@dataclass(slots=True)
class _Watched:
    """A job whose page is open."""

    handle: JobHandle
    asked_at: float
    feed: JournalFeed | None = None
    opened_at: float = 0.0  # when the feed was
    heard: bool = False  # the feed has told something
    history: Facts = field(default_factory=Facts)
    begun: int = 0  # how often the journal has begun, from all feeds
    lines: int = 0
    content: str = "null"  # JSON: what the page shows
    news: News | None = None
    failed_at: float | None = None

    def close(self) -> None:
        if self.feed is not None:
            with suppress(Exception):  # it is not needed any more
                self.feed.close()
        self.feed = None


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
            watched.close()

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
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a cluster must not end the list for good
            missing, handles, kept = [flat(error) or type(error).__name__], [], self._jobs
        asked = zip(handles, of_each(handles, self._status), strict=True)
        jobs: dict[Key, Known] = {(handle.namespace, handle.name): (handle, status) for handle, status in asked}
        if self._over.is_set():
            return
        jobs = {**jobs, **{key: job for key, job in kept.items() if key not in jobs}}
        self._jobs = jobs
        content = as_json([_row(key, status) for key, (_, status) in jobs.items()])
        notice = as_json("; ".join(missing))
        self._overview = News(content, str(hash((content, notice))), notice=notice)

    def _status(self, handle: JobHandle) -> pb.JobStatus:
        if self._over.is_set():  # nobody waits for more answers
            return pb.JobStatus()
        try:
            return handle.status()
        except Exception as error:  # noqa: BLE001 - a job that has just gone, or has damaged files, must not end the list
            return pb.JobStatus(phase="unreachable", reason=str(error), time_left=-1)

    # ---- journals of jobs, in the other ----

    def _keep_pages(self) -> None:
        while not self._over.is_set():
            more = False
            for key in tuple(self._asked):
                self._asked.discard(key)
                handle, _ = self._jobs.get(key, (None, None))  # in one look, as the list may change
                if handle is not None and key not in self._watched:
                    self._watched[key] = _Watched(handle, self._clock())
            for key, watched in tuple(self._watched.items()):
                now = self._clock()
                if now - watched.asked_at > ASKED_SECONDS:
                    del self._watched[key]
                    watched.close()
                elif watched.failed_at is None or now - watched.failed_at > AGAIN_SECONDS:
                    more |= self._refresh(key, watched)
            self._woken.wait(0 if more else LOOK_SECONDS)
            self._woken.clear()

    def _refresh(self, key: Key, watched: _Watched) -> bool:
        """Whether there may be more to read at once. What fails is told in the page, and begun anew later."""
        try:
            more = self._read(key, watched)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one job must not end the pages of the others
            watched.close()
            watched.failed_at = self._clock()
            notice = as_json(
                f"This page could not be brought up to date, and is tried again: {flat(error) or type(error).__name__}"
            )
            watched.news = News(watched.content, f"failed-{watched.failed_at}", notice=notice)
            return False
        watched.failed_at = None
        return more

    def _read(self, key: Key, watched: _Watched) -> bool:
        if watched.feed is None:
            watched.history, watched.lines = Facts(watched.handle.name), 0
            watched.feed, watched.opened_at, watched.heard = watched.handle.feed(earlier=True), self._clock(), False
        anew, lines = watched.feed.read()
        if anew:
            watched.history, watched.lines = Facts(watched.handle.name), 0
            watched.begun += 1
        watched.history.read(lines)
        watched.lines += len(lines)
        _, status = self._jobs.get(key, (None, None))
        # A journal that comes over the network has nothing to tell at first; one that stays silent is empty.
        watched.heard |= anew or bool(lines)
        has_begun = watched.heard or self._clock() - watched.opened_at > BEGIN_SECONDS
        if has_begun and len(lines) < ENOUGH:
            self._publish(watched, status)
        return len(lines) >= ENOUGH

    def _publish(self, watched: _Watched, status: pb.JobStatus | None) -> None:
        history = with_status(watched.history, status, self._clock())
        revision = f"{watched.begun}-{watched.lines}-{_age_drawn(history.until - history.began)}-{history.phase}"
        if watched.news is None or watched.news.revision != revision:
            watched.content = as_json(page_data(history))
            # A page that is over is asked for rarely: so it is only once the journal itself has told the end.
            watched.news = News(watched.content, revision, over=history.counts.get("job_finished", 0) > 0)


def _age_drawn(age: float) -> int:
    """Another number whenever a page of a job of this age is to be drawn anew."""
    steady = REDRAWN * STALE_SECONDS  # from this age on the seconds are less than the part
    return int(REDRAWN * math.log(max(1.0, min(age, steady))) + max(0.0, age - steady) / STALE_SECONDS)


def with_status(history: Facts, status: pb.JobStatus | None, now: float) -> History:
    """With what the job's status says of a job that has not told its end."""
    goes_on = status is not None and status.phase in ("starting", "pending", "running", "waiting", "stopping")
    found = history.result(now if goes_on else 0.0)
    if not any(found.counts.values()):  # else it would have begun in 1970
        elapsed = 0.0 if status is None or not math.isfinite(status.elapsed) else status.elapsed
        found = replace(found, began=now - min(max(0.0, elapsed), now), until=now)
    if found.over or status is None:
        return found
    if goes_on:
        found = _trained(found, status)
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


def _row(key: Key, status: pb.JobStatus) -> dict[str, str]:
    namespace, name = key
    return {"name": name, "namespace": namespace, "page": job_path(namespace, name), **wording.facts(status)}
