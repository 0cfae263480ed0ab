"""In CPython 3.11, which Debian 12 has, a thread that parses Python code makes another thread's parsing fail (python/cpython#106905).

NumPy parses code, too: it does so with the header of each array that it reads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TRIES = 10
PAUSE_SECONDS = 0.002  # at most, and by chance, so that two threads do not keep step


def parsed_beside_threads(parse: Callable[[], T]) -> T:
    """What ``parse`` returns, which is called again if another thread has made it fail.

    Raises:
        SystemError: it fails each time, so no thread is to blame.
    """
    for _ in range(TRIES - 1):
        try:
            return parse()
        except SystemError:
            time.sleep(random.Random().uniform(0, PAUSE_SECONDS))  # not of the training's generator
    return parse()
