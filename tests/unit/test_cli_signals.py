"""A command that waits for a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

TIMEOUT = 60.0
# The signal comes to another thread: as with one that comes just before it waits, nothing breaks the main thread's wait off.
PROGRAM = """
import os, signal, threading, time
from elasticdl.cli.signals import SignalLog, caught

signals = SignalLog()
with caught(signals.add_or_raise):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("waits", flush=True)
    signals.wait()
os._exit(signals.first)
"""


def test_a_signal_ends_the_wait_though_it_does_not_break_it_off():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, env=os.environ) as process:
        process.stdout.readline()
        process.terminate()
        try:
            assert process.wait(TIMEOUT) == signal.SIGTERM
        finally:
            process.kill()
