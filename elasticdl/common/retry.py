"""Trying again until there is an answer, and waiting until something is so."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import ElasticDLError, UnreachableError

T = TypeVar("T")


async def retry(
    attempt: Callable[[], Awaitable[T]],
    what: str,
    backoff: Backoff,
    seconds: float = math.inf,
    failed: Callable[[Exception], None] = lambda _: None,
) -> T:
    """Attempt until it succeeds; ``failed`` is told each failure after which it is tried again.

    Raises:
        UnreachableError: ``seconds`` were over before it succeeded.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            return await attempt()
        except (ElasticDLError, OSError) as error:
            failure = error
        delay = backoff.delay(getattr(failure, "retry_after", 0.0))
        if loop.time() + delay > deadline:
            raise UnreachableError(f"can't {what}: {failure}") from failure
        failed(failure)
        await asyncio.sleep(delay)


async def until(condition: Callable[[], object], changed: asyncio.Event, seconds: float) -> None:
    """Wait until that is so, at most so long; ``changed`` is set whenever it is to be looked at again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                changed.clear()
                await changed.wait()
