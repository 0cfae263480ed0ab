"""Writes down which files of the package a process runs through, and when: a line `TIME FILE CALL` into TRACE.PID for each change of
the file.

For processes that have ELASTICDL_TRACE. CALL is the call of the protocol within which the file runs, or `-`. What runs only because a
module is imported is left out.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

PACKAGE = os.sep + "elasticdl" + os.sep
CALLS = {"Status"}


def file_of(name: str) -> str:
    """Below the package; empty if it is not of the package."""
    _, found, path = name.rpartition(PACKAGE)
    return path if found and "site-packages" not in name else ""


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def begin(trace: str) -> None:
    files: dict[str, str] = {}
    acted: set[str] = set()
    own = threading.local()
    pid = os.getpid()
    sink = os.open(f"{trace}.{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or os.getpid() != pid or frame.f_code.co_name == "<module>":
            return
        name = frame.f_code.co_filename
        path = files.get(name)
        if path is None:
            path = files[name] = file_of(name)
        if not path or path == getattr(own, "last", ""):
            return
        stack = list(stack_of(frame))
        if path not in acted:
            if any(each.f_code.co_filename.startswith("<frozen importlib") for each in stack):
                return
            acted.add(path)
        own.last = path
        call = next((each.f_code.co_name for each in stack if each.f_code.co_name in CALLS), "-")
        os.write(sink, f"{time.time():.6f} {path} {call}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


if trace := os.environ.get("ELASTICDL_TRACE"):
    begin(trace)
