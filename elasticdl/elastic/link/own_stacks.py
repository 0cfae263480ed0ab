"""Where the threads of this process stand."""

from __future__ import annotations

import gc
import sys
from types import FrameType

from elasticdl.common.reason import Line, Stack


def stack_of(thread: int) -> Stack:
    """The stack of a thread of this process; without lines if it has ended."""
    frame = current_frames().get(thread)
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(Line(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return Stack(tuple(lines))


def current_frames() -> dict[int, FrameType]:
    """Frames by thread, taken without garbage collection.

    CPython holds a lock of its interpreter meanwhile. A collection may run finalizers that let other threads run, as TensorFlow's
    do. As soon as one of these threads wanted the lock, the process would stop for good.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
