"""Tells the cluster what happens to a job, as events on its Job. Best effort: nothing waits for it, and it stops nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from elasticdl.kubernetes.api_error import ApiError
from elasticdl.master.launchers.kubernetes.notices import Digest, Notice, make_event, notice_of
from elasticdl.master.observers.observer import Observer

FINISH_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Announcer(Observer):
    """Events about ``subject``, a reference to an object, while `announcing`."""

    def __init__(self, create: Callable[[dict[str, Any]], object], subject: Mapping[str, str]) -> None:
        """``create`` makes an event; it blocks, and raises `ApiError`."""
        self._create = create
        self._subject = subject
        self._digest = Digest(time.monotonic())
        self._news = asyncio.Event()
        self._over = False
        self._failed = False

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if notice := notice_of(event, fields, time.time()):
            self._digest.add(notice)
            self._news.set()

    @asynccontextmanager
    async def announcing(self) -> AsyncIterator[None]:
        """At the end what is left is told, for as long as `FINISH_SECONDS`."""
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
            seconds = self._digest.wait(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    await self._news.wait()
            self._news.clear()
            if notice := self._digest.take(time.monotonic()):
                await self._tell(notice)
        for notice in self._digest.rest():
            await self._tell(notice)

    async def _tell(self, notice: Notice) -> None:
        try:
            await asyncio.to_thread(self._create, make_event(notice, self._subject))
        except ApiError as failure:
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            _log.log(level, "can't tell the cluster that %s: %s; going on without", notice.reason, failure)
