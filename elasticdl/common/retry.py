"""On an event loop: trying again until there is an answer, waiting until something is so, and work beside other work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import ElasticDLError, UnreachableError

_log = logging.getLogger(__name__)
T = TypeVar("T")


async def retry(
    attempt: Callable[[], Awaitable[T]],
    what: str,
    backoff: Backoff,
    seconds: float = math.inf,
    lasting: Callable[[Exception], object] = lambda _: False,
) -> T:
    """Attempt until it succeeds. A failure that is ``lasting`` is raised.

    Raises:
        UnreachableError: ``seconds`` were over before it succeeded.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            return await attempt()
        except (ElasticDLError, OSError) as error:
            if lasting(error):
                raise
            failure = error
        delay = backoff.delay(getattr(failure, "retry_after", 0.0))
        if loop.time() + delay > deadline:
            raise UnreachableError(f"can't {what}: {failure}") from failure
        _log.info("can't %s, and try again: %s", what, failure)
        await asyncio.sleep(delay)


async def until(condition: Callable[[], object], changed: asyncio.Event, seconds: float) -> None:
    """Wait until that is so, at most so long; ``changed`` is set whenever it is to be looked at again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                changed.clear()
                await changed.wait()


class Background:
    """The tasks of one owner, which ends them, and hears if one fails."""

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
