"""Where the threads of this process stand."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

from elasticdl.common.reason import Line, Stack

OWN_THREADS = "elasticdl-"  # names of this package's threads begin so


def stack_of(thread: threading.Thread | int) -> Stack:
    """The stack of a thread of this process; without lines if it has ended."""
    ident = thread if isinstance(thread, int) else thread.ident or 0
    name = next((each.name for each in threading.enumerate() if each.ident == ident), str(ident))
    frame = current_frames().get(ident)
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(Line(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return Stack(name, tuple(lines))


def other_stacks(training: int) -> list[Stack]:
    """Stacks of this process's threads, except this thread, the training's and this package's own."""
    without = (training, threading.get_ident())
    threads = [each for each in threading.enumerate() if each.ident not in without]
    return [stack_of(each) for each in threads if not each.name.startswith(OWN_THREADS)]


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
