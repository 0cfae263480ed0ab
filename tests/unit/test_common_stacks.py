"""Stacks in a few lines: whose line it is, and what faulthandler has written."""

import os
import subprocess
import sys
import threading

import pytest

from elasticdl.common.reason import MOST_LINES, PACKAGE, Line, Stack, describe, last_words, parse
from elasticdl.elastic.link.witness import stack_of

STANDARD = "/usr/lib/python3.11/threading.py"
LIBRARY = "/venv/lib/python3.11/site-packages/torch/nn/module.py"
OWN = str(PACKAGE / "worker" / "trainer.py")
USERS = "/home/me/train.py"


WAIT, FORWARD, TRAINER = Line(STANDARD, 320, "wait"), Line(LIBRARY, 7, "forward"), Line(OWN, 5, "step")
FROZEN = Line("<frozen runpy>", 9, "run")


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (
            (WAIT, FORWARD, TRAINER, FROZEN, Line(USERS, 31, "load"), Line(USERS, 99, "main")),
            "/home/me/train.py:31 in load",
        ),
        ((WAIT, FORWARD), "torch/nn/module.py:7 in forward"),
        ((WAIT,), "threading.py:320 in wait"),
        ((), ""),
    ],
    ids=["the user's", "a library's", "any", "none"],
)
def test_the_innermost_line_is_where_it_stands(lines, where):
    assert Stack(lines).where == where


def test_the_users_lines_come_first_and_there_are_not_too_many():
    training = Stack((Line(STANDARD, 1, "wait"), *(Line(USERS, n, "f") for n in range(200))))
    lines = describe(training)
    assert lines[0] == "/home/me/train.py:0 in f"
    assert len(lines) == MOST_LINES


def test_what_faulthandler_writes_of_a_process_that_holds_pythons_lock(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import ctypes, faulthandler, sys, threading\n"
        "faulthandler.dump_traceback_later(0.2, file=sys.stderr)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def load():\n"
        "    ctypes.PyDLL(None).usleep(600_000)\n"
        "load()\n"
    )
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=280, check=True)
    stacks = parse(f"an earlier line\n{ended.stderr}a later line\n")
    assert stacks[0].where == f"{program}:5 in load"
    assert stacks[1].lines[0].function == "wait"


def test_only_the_last_dump_counts_and_what_others_print_in_between_is_passed_over():
    text = "Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n"
    first = text + '  File "/a.py", line 1 in f\n'
    second = text + '  File "/b.py", line 2 in g\nepoch 3\n  File "/b.py", line 9 in main\n'
    (stack,) = parse(first + second)
    assert [str(line) for line in stack.lines] == ["/b.py:2 in g", "/b.py:9 in main"]
    assert parse("no dump") == []


def test_the_stack_of_a_thread():
    event, begun = threading.Event(), threading.Event()

    def wait_here():
        begun.set()
        event.wait(60)

    thread = threading.Thread(target=wait_here)
    thread.start()
    begun.wait(60)
    try:
        assert "wait_here" in stack_of(thread.ident).where
    finally:
        event.set()
        thread.join()
    assert stack_of(os.getpid()).lines == ()


def test_the_last_words_of_a_log_are_the_crash_with_which_it_ends():
    crash = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
        '  File "/a/train.py", line 3 in load\n  File "<frozen importlib._bootstrap>", line 241 in _call\n'
        '  File "/a/train.py", line 9 in <module>\n\nExtension modules: numpy._core, torch._C (total: 2)\n'
    )

    told = [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x01 (most recent call first):",
        '  File "/a/train.py", line 3 in load',
        '  File "/a/train.py", line 9 in <module>',
    ]
    assert last_words(crash) == told
    tracker = (
        "/lib/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 14 leaked ones\n"
        "  warnings.warn(\n"
    )
    assert last_words(f"{crash}{tracker}") == told
    shell = "run.sh: line 2: 17 Segmentation fault      (core dumped) python train.py\n"
    assert last_words(f"{crash}{shell}") == last_words(f"{crash}{tracker}{shell}") == told
    why = [f"line {number}" for number in range(9)] + ["terminate called", "  what():  CUDA error: out of memory"]
    assert last_words("\n".join([*why, crash])) == [*why[-5:], *told]
    assert last_words(f"{crash}goes on\n") == []
    assert last_words("step 1\n") == []
