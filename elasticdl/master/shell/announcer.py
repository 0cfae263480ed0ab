"""Events on the Job, which a person sees with `kubectl describe job`: best effort.

Nothing waits for an event, and one that fails stops nothing. `notice_of` chooses entries of the journal. `Digest` keeps
events few, whatever happens to the job: a notice waits until it may be told, and a later one of the same reason takes its
place and counts both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from elasticdl.common.backoff import TokenBucket
from elasticdl.job.event_catalogue import KINDS, line
from elasticdl.kube.api_error import ApiError
from elasticdl.master.shell.observer import Observer
from elasticdl.places.pods.judge import ON_ITS_WAY

FINISH_SECONDS = 5.0
TIME = "%Y-%m-%dT%H:%M:%SZ"
BURST = 6
SECONDS_EACH = 20.0
# Causes for which a person should know that a worker left.
TOLD_CAUSES = ("preempted", "evicted", "node_lost", "deleted", "lost", "out_of_memory", "killed", "crashed", "frozen")
LONGEST = 1000  # bytes of a message; the server refuses more than 1024 bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """Times in seconds since the epoch."""

    reason: str
    message: str
    first: float
    last: float
    warning: bool = False
    count: int = 1


def notice_of(event: str, fields: Mapping[str, Any], now: float) -> Notice | None:
    """The notice that an entry of the journal is worth, if any."""
    kind = KINDS.get(event)
    if kind is None or not kind.cluster or not (reason := reason_of(event, fields)):
        return None
    warning = event in ("worker_left", "phase") or fields.get("phase") == "failed"
    return Notice(reason, line(kind, fields), now, now, warning)


def reason_of(event: str, fields: Mapping[str, Any]) -> str:
    """The reason of the notice, a word for programs; empty: this entry is worth none."""
    match event:
        case "worker_left":
            return f"Worker{fields['cause'].title().replace('_', '')}" if fields["cause"] in TOLD_CAUSES else ""
        case "worker_pending":
            return "" if str(fields.get("reason")).startswith(ON_ITS_WAY) else "WorkerPending"
        case "phase":
            return "WaitingForWorkers" if fields["phase"] == "waiting" else ""
        case "job_finished":
            return f"Job{fields['phase'].capitalize()}"
        case _:
            return event.title().replace("_", "")


class Digest:
    """At most `BURST` at once, and one every `SECONDS_EACH` in the long run. Times are passed in."""

    def __init__(self) -> None:
        self._held: dict[str, Notice] = {}
        self._pace = TokenBucket(rate=1 / SECONDS_EACH, burst=BURST)

    def add(self, notice: Notice) -> None:
        older = self._held.get(notice.reason)
        if older:
            notice = replace(notice, first=older.first, count=older.count + notice.count)
        self._held[notice.reason] = notice

    def take(self, now: float) -> Notice | float:
        """The notice that has waited longest; or for how many seconds it has to wait yet, infinite if there is none."""
        if not self._held:
            return math.inf
        return self._pace.take(now) or self._held.pop(next(iter(self._held)))

    def rest(self) -> list[Notice]:
        """All, at the end of the job; they are one of each reason."""
        held, self._held = list(self._held.values()), {}
        return held


def make_event(notice: Notice, subject: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of an event. ``subject``: a reference to the object that it is about."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{subject['name']}-", "namespace": subject["namespace"]},
        "involvedObject": dict(subject),
        "reason": notice.reason,
        "message": notice.message.encode()[:LONGEST].decode(errors="ignore"),
        "type": "Warning" if notice.warning else "Normal",
        "count": notice.count,
        "firstTimestamp": datetime.fromtimestamp(notice.first, UTC).strftime(TIME),
        "lastTimestamp": datetime.fromtimestamp(notice.last, UTC).strftime(TIME),
        "source": {"component": "elasticdl"},
    }


class Announcer(Observer):
    """Events about ``subject``, a reference to an object, while `announcing`."""

    def __init__(self, create: Callable[[dict[str, Any]], object], subject: Mapping[str, str]) -> None:
        """``create`` makes an event; it blocks, and raises `ApiError`."""
        self._create = create
        self._subject = subject
        self._digest = Digest()
        self._news = asyncio.Event()
        self._over = False
        self._failed = False

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if notice := notice_of(event, fields, time.time()):
            self._digest.add(notice)
            self._news.set()

    @asynccontextmanager
    async def announcing(self) -> AsyncIterator[None]:
        """At the end the rest is told; that may take `FINISH_SECONDS`."""
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            self._over = True
            self._news.set()
            done, _ = await asyncio.wait({task}, timeout=FINISH_SECONDS)
            task.cancel()
            if done and (error := task.exception()):
                _log.error("telling the cluster what happens has failed", exc_info=error)

    async def _work(self) -> None:
        while not self._over:
            due = self._digest.take(time.monotonic())
            if isinstance(due, Notice):
                await self._tell(due)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(due) else due):
                    await self._news.wait()
            self._news.clear()
        for notice in self._digest.rest():
            await self._tell(notice)

    async def _tell(self, notice: Notice) -> None:
        try:
            await asyncio.to_thread(self._create, make_event(notice, self._subject))
        except ApiError as failure:
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            _log.log(level, "can't tell the cluster that %s: %s; going on without", notice.reason, failure)
