"""Events on the Job, which a person sees with `kubectl describe job`: best effort.

Nothing waits for an event, and one that fails stops nothing. `notice_of` chooses entries of the journal. What is too much is left out,
whatever happens to the job, and the next event says how many were; the end of the job is always told.
"""

from __future__ import annotations

import asyncio
import logging
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
    """``time``: seconds since the epoch."""

    reason: str
    message: str
    time: float
    warning: bool = False


def notice_of(event: str, fields: Mapping[str, Any], now: float) -> Notice | None:
    """The notice that an entry of the journal is worth, if any."""
    kind = KINDS.get(event)
    if kind is None or not kind.cluster or not (reason := reason_of(event, fields)):
        return None
    warning = event in ("worker_left", "phase") or fields.get("phase") == "failed"
    return Notice(reason, line(kind, fields), now, warning)


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


def make_event(notice: Notice, subject: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of an event. ``subject``: a reference to the object that it is about."""
    moment = datetime.fromtimestamp(notice.time, UTC).strftime(TIME)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{subject['name']}-", "namespace": subject["namespace"]},
        "involvedObject": dict(subject),
        "reason": notice.reason,
        "message": notice.message.encode()[:LONGEST].decode(errors="ignore"),
        "type": "Warning" if notice.warning else "Normal",
        "count": 1,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "source": {"component": "elasticdl"},
    }


class Announcer(Observer):
    """Events about ``subject``, a reference to an object, while `announcing`: at most `BURST` at once, and one every `SECONDS_EACH`
    in the long run.

    ``create`` makes an event; it blocks, and raises `ApiError`.
    """

    def __init__(
        self,
        create: Callable[[dict[str, Any]], object],
        subject: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._create = create
        self._subject = subject
        self._clock = clock
        self._pace = TokenBucket(rate=1 / SECONDS_EACH, burst=BURST)
        self._left_out = 0  # since the last that was told
        self._due: asyncio.Queue[Notice | None] = asyncio.Queue()  # None: the last was before it
        self._failed = False

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if (notice := notice_of(event, fields, time.time())) is None:
            return
        if self._pace.take(self._clock()) and event != "job_finished":
            self._left_out += 1
            return
        if self._left_out:
            notice = replace(notice, message=f"({self._left_out:,} events before it were left out) {notice.message}")
        self._left_out = 0
        self._due.put_nowait(notice)

    @asynccontextmanager
    async def announcing(self) -> AsyncIterator[None]:
        """At the end the rest is told; that may take `FINISH_SECONDS`."""
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            self._due.put_nowait(None)
            done, _ = await asyncio.wait({task}, timeout=FINISH_SECONDS)
            task.cancel()
            if done and (error := task.exception()):
                _log.error("telling the cluster what happens has failed", exc_info=error)

    async def _work(self) -> None:
        while notice := await self._due.get():
            try:
                await asyncio.to_thread(self._create, make_event(notice, self._subject))
            except ApiError as failure:
                level = logging.DEBUG if self._failed else logging.WARNING
                self._failed = True
                _log.log(level, "can't tell the cluster that %s: %s; going on without", notice.reason, failure)
