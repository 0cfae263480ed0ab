"""The claims of jobs that share a queue. Each job has a Lease: this job's claim is written to its own, the others' are read.

A claim counts as long as it is renewed, that is, as long as the version of its Lease changes. This master's own clock
measures the time between two versions, as the clocks of nodes differ.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from elasticdl.common.backoff import Backoff
from elasticdl.kube.api_error import ApiError
from elasticdl.kube.client import Client
from elasticdl.kube.manifests.names import CLAIM_ANNOTATION, JOB_LABEL, QUEUE_LABEL, claim_name
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.claim import Claim
from elasticdl.master.state.events import NeighboursSeen

LOOK_SECONDS = 2.0
# The longest time between two tries while claims can't be read or written. It is shorter than `STALE_SECONDS`.
LONGEST_SECONDS = 10.0
# A claim that was not renewed for so long belongs to a job that is over, or cut off.
STALE_SECONDS = 30.0
TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_log = logging.getLogger(__name__)


class Neighbours(Observer):
    """Used on one event loop. Times in seconds of ``clock``."""

    def __init__(self, client: Client, job: str, queue: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._job = job
        self._queue = queue
        self._clock = clock
        self._own: Claim | None = None
        self._renewed: dict[str, tuple[str, float]] = {}  # by job: version of its claim, and when that was seen first
        self._unreadable: set[str] = set()  # jobs whose last claim could not be read: the log says so once
        self._backoff = Backoff(first=LOOK_SECONDS, longest=LONGEST_SECONDS)

    def claimed(self, claim: Claim) -> None:
        self._own = claim

    @asynccontextmanager
    async def sharing(self, post: Callable[[NeighboursSeen], None]) -> AsyncIterator[None]:
        """Exchange claims while it is open. At the end this job's claim is withdrawn."""
        task = asyncio.create_task(self._exchange(post))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            try:
                await asyncio.to_thread(self._write, None)
            except Exception as error:  # noqa: BLE001 - the claim gets stale by itself
                _log.debug("the claim of job %s stays until it is stale: %s", self._job, error)

    async def _exchange(self, post: Callable[[NeighboursSeen], None]) -> None:
        while True:
            try:
                if self._own is not None:
                    await asyncio.to_thread(self._write, self._own)
                    listed = partial(self._client.list, "Lease", label_selector=f"{QUEUE_LABEL}={self._queue}")
                    post(NeighboursSeen(self._claims(await asyncio.to_thread(listed))))
                self._backoff.reset()
            except Exception as error:  # noqa: BLE001 - the job goes on in any case, and may share again later
                if not self._backoff.failures:
                    text = "the jobs of queue %s can't be seen: %s; this one keeps its share, and goes on trying"
                    mistake = None if isinstance(error, ApiError) else error
                    _log.warning(text, self._queue, error, exc_info=mistake)
                self._backoff.delay()
            await asyncio.sleep(max(LOOK_SECONDS, self._backoff.bound()))

    def _write(self, claim: Claim | None) -> None:
        """None: this job claims nothing."""
        annotations = {CLAIM_ANNOTATION: claim.to_json() if claim else None}
        renewed = {"holderIdentity": self._job, "renewTime": datetime.now(UTC).strftime(TIME)}
        change = {"metadata": {"annotations": annotations}, "spec": renewed}
        self._client.patch("Lease", claim_name(self._job), change)

    def _claims(self, leases: list[dict[str, Any]]) -> tuple[Claim, ...]:
        """The claims of other jobs, as far as they count."""
        now, found = self._clock(), []
        for lease in leases:
            metadata = lease["metadata"]
            job, text = (
                metadata.get("labels", {}).get(JOB_LABEL, ""),
                metadata.get("annotations", {}).get(CLAIM_ANNOTATION),
            )
            if text is None or job == self._job:
                continue
            version, since = self._renewed.get(job, ("", now))
            if version != metadata["resourceVersion"]:
                self._renewed[job] = metadata["resourceVersion"], now
            elif now - since > STALE_SECONDS:
                continue
            try:
                claim = Claim.from_json(text)
            except ValueError as error:
                if job not in self._unreadable:
                    _log.warning("what job %s claims can't be read: %s", job, error)
                self._unreadable.add(job)
                continue
            self._unreadable.discard(job)
            if claim.job == job:
                found.append(claim)
        return tuple(found)
