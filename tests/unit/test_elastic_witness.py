"""Where a worker stands, told by itself and left behind by a timer."""

import hashlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

from session_kit import FakeMaster

from elasticdl.common.credentials import STACKS
from elasticdl.common.reason import Line, Stack
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.witness import Operations, SlowStart, Witness
from elasticdl.job import messages as m
from tests.waiting import wait_until

DEADLINE = 30.0


def told_of(work):
    """What a witness tells of a thread that does this."""
    begun, over, told, fields = threading.Event(), threading.Event(), threading.Event(), []
    training = threading.Thread(target=work, args=(begun, over))
    training.start()
    begun.wait(DEADLINE)
    witness = Witness()
    witness.thread, witness.operations = training.ident, lambda: Operations(7, ("gradients.0",))
    witness.look(lambda each: (fields.append(each), told.set()))
    assert told.wait(DEADLINE)
    over.set()
    training.join()
    return fields[0]


def stand_here(begun, over):
    begun.set()
    over.wait(DEADLINE)


def compute(begun, over):
    begun.set()
    while not over.is_set():
        hashlib.pbkdf2_hmac("sha256", b"of C", b"without Python's lock", 3_000_000)


def test_it_tells_the_line_that_the_training_thread_stands_at_and_whether_it_moves():
    told = told_of(stand_here)
    assert told["where"].endswith("in stand_here")
    assert told["stack"][0] == told["where"]
    assert (told["moves"], told["collectives"], told["last_collectives"]) == (False, 7, ["gradients.0"])
    assert told_of(compute)["moves"], "also in a call of C"


def stack(number, path="zoo/slow.py"):
    return Stack((Line("/usr/lib/python3.11/socket.py", 5, "recv"), Line(path, number, "dataset")))


def test_what_takes_long_before_a_worker_is_ready_is_told_once():
    start = SlowStart()
    assert start.look(stack(20), 0.0) == start.look(stack(20), 4.9) == ""
    assert start.look(stack(21), 5.1) == "", "it moves"
    assert start.look(stack(21), 10.0) == ""
    assert start.look(stack(21), 10.2) == "zoo/slow.py:21 in dataset"
    assert start.look(stack(21), 60.0) == start.look(stack(9), 70.0) == start.look(stack(9), 80.0) == ""
    of_library = stack(3, "/x/site-packages/datasets/load.py")
    assert SlowStart().look(of_library, 0.0) == SlowStart().look(of_library, 9.0) == ""


def test_the_master_that_asks_gets_a_notice(capfd):
    master = FakeMaster()
    master.session.post(p.Trigger.READY)
    master.session.post(p.Ordered(m.DumpStacks()))
    last, printed = "the master asks for the stacks of all threads", []
    wait_until(lambda: printed.append(capfd.readouterr().err) or last in "".join(printed))
    assert master.notices("worker_stuck")[0]["stack"]


def python(tmp_path, program):
    command, environ = [sys.executable, "-c", program], {**os.environ, STACKS: str(tmp_path / "stacks")}
    return subprocess.Popen(command, env=environ)


PRINTS = """
import os, sys, threading
from elasticdl.elastic.link.witness import Witness
told = threading.Event()
def ask():
    Witness().look(lambda fields: told.set())
    os._exit(0 if told.wait(20) else 1)
_, writer = os.pipe()
os.dup2(writer, 2)
threading.Timer(0.3, ask).start()
while True:
    print("x" * 15, file=sys.stderr, flush=True)
"""


def test_it_tells_though_stderr_is_full(tmp_path):
    assert python(tmp_path, PRINTS).wait(DEADLINE) == 0


HANGS = """
import ctypes, os, sys
from elasticdl.elastic.link.witness import DumpTimer
timer = DumpTimer(os.environ, 0.3)
timer.arm()
def hang():
    ctypes.PyDLL(None).usleep(3000000)
hang()
timer.arm()
pid = os.fork()
if pid == 0:
    sys.exit(0)  # ends Python in the usual way, which waits for a timer's thread: this one has none
os.waitpid(pid, 0)
timer.arm()
timer.close()
"""


def test_a_dump_is_left_while_pythons_lock_is_held_and_gone_when_it_goes_on(tmp_path):
    ended, stacks = python(tmp_path, HANGS), tmp_path / "stacks"
    wait_until(lambda: stacks.exists() and "in hang" in stacks.read_text())
    assert ended.wait(DEADLINE) == 0
    assert stacks.read_text() == ""


def test_a_session_that_has_ended_leaves_no_timer():
    closed, stream = [], SimpleNamespace(send=list, close=lambda: None)
    Session(WorkerCore(3), stream, SimpleNamespace(close=lambda: closed.append(True))).close()
    assert closed == [True]
