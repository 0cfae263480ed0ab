"""Of a process that has ELASTICDL_TRACE: a line `TIME FILE CALL` in TRACE.PID whenever another file of the package runs.

CALL is the call of the protocol within which the file runs, or `-`. What runs only because a module is imported is left out.
"""

import os
import sys
import threading
import time

PACKAGE = os.sep + "elasticdl" + os.sep
CALLS = {"Status"}


def begin(trace):
    acted, own, pid = set(), threading.local(), os.getpid()
    sink = os.open(f"{trace}.{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event != "call" or PACKAGE not in name or name == getattr(own, "last", "") or "site-packages" in name:
            return
        if os.getpid() != pid or frame.f_code.co_name == "<module>":
            return
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        if name not in acted and any(each.co_filename.startswith("<frozen importlib") for each in stack):
            return
        acted.add(name)
        own.last = name
        call = next((each.co_name for each in stack if each.co_name in CALLS), "-")
        os.write(sink, f"{time.time():.6f} {name.rpartition(PACKAGE)[2]} {call}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


if trace := os.environ.get("ELASTICDL_TRACE"):
    begin(trace)
