"""To wait until something is so, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(
    condition: Callable[[], Result], describe: Callable[[], object] = str, seconds: float = 60.0, poll: float = 0.01
) -> Result:
    """What ``condition`` returns, once that is true. ``describe`` says how it is otherwise."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {describe()}"
        time.sleep(poll)
    return found
