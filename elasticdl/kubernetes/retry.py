"""When and how often something is tried again."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from elasticdl.common.errors import UnreachableError
from elasticdl.kubernetes.api_error import ApiError

T = TypeVar("T")


class Backoff:
    """Delays that double up to a bound, each drawn from the upper half of its range, so that many do not come at once."""

    def __init__(self, rng: random.Random, first: float = 0.5, longest: float = 30.0) -> None:
        self._rng = rng
        self._first = first
        self._longest = longest
        self._next = first

    def delay(self, at_least: float = 0.0) -> float:
        bound, self._next = self._next, min(self._longest, self._next * 2)
        return max(at_least, bound * (0.5 + self._rng.random() / 2))

    def reset(self) -> None:
        self._next = self._first


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
        except (ApiError, OSError) as error:
            failure = error
        delay = backoff.delay(getattr(failure, "retry_after", 0.0))
        if loop.time() + delay > deadline:
            raise UnreachableError(f"can't {what}: {failure}") from failure
        failed(failure)
        await asyncio.sleep(delay)
