"""Telling that memory is short, in what the job does besides the user's code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from elasticdl.common.errors import ShortOfMemoryError
from elasticdl.common.reason import one_line

CLASSES = frozenset({"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"})  # of Python, PyTorch and TensorFlow


def is_out_of_memory(error: BaseException) -> bool:
    return any(each.__name__ in CLASSES for each in type(error).__mro__) or "out of memory" in str(error).lower()


@contextlib.contextmanager
def memory_of_the_worker(what: str) -> Iterator[None]:
    """Within, an error that says so becomes one whose cause is this worker, and not the user's code.

    Raises:
        ShortOfMemoryError: there was too little memory for it, on the device or the host.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ShortOfMemoryError(f"too little memory for {what}: {one_line(error)}") from error
        raise
