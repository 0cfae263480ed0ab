"""Work beside an event loop's other work, of which somebody hears if it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from elasticdl.common.errors import UnreachableError

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Background:
    """The tasks of one owner, which ends them."""

    def __init__(self, what: str, failed: Callable[[str], None]) -> None:
        """``failed`` is told in one line what a task has raised, as nobody waits for it; not `UnreachableError`, which has its own
        way. ``what``: the beginning of that line, what is not done any more."""
        self._what = what
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def wait(self, timeout: float | None = None) -> bool:
        """Until there are none; False if some last longer than ``timeout`` seconds."""
        while self._tasks:
            _, lasting = await asyncio.wait(self._tasks, timeout=timeout)
            if lasting:
                return False
        return True

    async def cancel(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, UnreachableError):
            _log.error("%s no longer", self._what, exc_info=error)
            self._failed(f"{self._what} no longer: {type(error).__name__}: {error}")
