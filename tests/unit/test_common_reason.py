"""What a person is told of an exception, a stack or a crash: in few lines, never an empty one, and with the place in their own code."""

import subprocess
import sys

import pytest

from elasticdl.common import reason as reasons
from elasticdl.common.reason import Line, Stack, describe, last_exception, last_line, last_words, one_line, parse

LOADER = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "train.py", line 9, in __getitem__
    raise ValueError(text)
ValueError: no image
in there
"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise ValueError('first\\nsecond')", "train.py:1: ValueError: first"),
        ("x = 1\nassert x > 1", "train.py:2: AssertionError, which says nothing, raised by `assert x > 1`"),
        ("raise RuntimeError('\\n one\\n two\\n\\n three')", "train.py:1: RuntimeError: one two"),
        ("compile('x = ', 'mine.py', 'exec')", "mine.py:1: SyntaxError: invalid syntax (mine.py, line 1)"),
        ("import elasticdl.common.errors as e\nraise e.UserError('mine.py:7: call it')", "mine.py:7: call it"),
    ],
)
def test_a_reason_is_the_place_the_type_what_was_said_and_what_helps(code, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(code)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        exec(compile(code, str(script), "exec"), {})
    assert reasons.reason(caught.value) == line


def wrapped(text):
    call = f"Exception encountered when calling Net.call().\n\n\x1b[1m{text}\x1b[0m\n\n"
    return f"{call}Arguments received by Net.call():\n  • inputs=1"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(), "ValueError, which says nothing"),
        (ValueError(LOADER), "ValueError: no image"),
        (ValueError(wrapped("no such shape")), "ValueError: no such shape"),
        (OSError("{{function_node __wrapped__X_device_/device:CPU:0}} 7 is not in [0, 5) [Op:X] name: "), "OSError: 7 is not in [0, 5)"),
    ],
)  # fmt: skip
def test_one_line_holds_what_was_said(error, line):
    assert one_line(error) == line


# ---- what a process that has ended by an exception has printed of it ----

TORCHRUN = 'the script is written for torchrun: docs/migration.md has under "From torchrun" what becomes of each line'
NESTED = 'import json\ndef load():\n    return json.loads("")\ntry:\n    {}["x"]\nexcept KeyError:\n    load()\n'


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (NESTED, "train.py:3: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("x = (", "train.py:1: SyntaxError: '(' was never closed"),
        ("import os\nos.environ['LOCAL_RANK']", f"train.py:2: KeyError: 'LOCAL_RANK'; {TORCHRUN}"),
    ],
)
def test_what_python_says_in_the_end_is_told_with_the_users_line(tmp_path, monkeypatch, code, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(code)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    output = subprocess.run([sys.executable, str(tmp_path / "train.py")], **both, text=True, check=False).stdout
    assert last_exception(f"step 1\n{output}") == told
    of_rank = "".join(f"[rank1]: {line}\n" if line else "\n" for line in output.splitlines())  # as torch prints it
    assert last_exception(of_rank) == told


def test_an_exception_that_was_caught_long_before_the_end_is_none():
    logged = "Traceback (most recent call last):\n"
    logged += '  File "/a/train.py", line 3, in <module>\n    f()\nValueError: once\n'
    assert last_exception(logged) == "/a/train.py:3: ValueError: once"
    for output in (logged + "step\n" * 30, "step 1\nstep 2\n", "", logged.rpartition("ValueError")[0]):
        assert last_exception(output) == ""
    assert last_line("usage: a.py\na.py: error: no such option\n\n") == "a.py: error: no such option"
    assert last_line("") == ""


CRASH = """Fatal Python error: Segmentation fault

Current thread 0x01 (most recent call first):
  File "/a/train.py", line 3 in load
  File "<frozen importlib._bootstrap>", line 241 in _call
  File "/a/train.py", line 9 in <module>

Extension modules: numpy._core, torch._C (total: 2)
"""
WORDS = [line for line in CRASH.splitlines()[:-1] if line and "frozen" not in line]
WHY = [*(f"line {number}" for number in range(9)), "terminate called", "  what():  CUDA error: out of memory"]
AFTER = "/lib/resource_tracker.py:224: UserWarning: 14 leaked ones\n  warnings.warn(\nrun.sh: line 2: 17 Segmentation fault\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [(CRASH + AFTER, WORDS), ("\n".join([*WHY, CRASH]), [*WHY[-5:], *WORDS]), (f"{CRASH}goes on\n", [])],
)
def test_the_last_words_of_a_log_are_the_crash_with_which_it_ends(log, told):
    assert last_words(log) == told


# ---- stacks: whose line it is, and what faulthandler has written ----

USERS = "/home/me/train.py"
WAIT = Line("/usr/lib/python3.11/threading.py", 320, "wait")
FORWARD = Line("/venv/lib/python3.11/site-packages/torch/nn/module.py", 7, "forward")
TRAINER, FROZEN = Line(str(reasons.PACKAGE / "worker" / "trainer.py"), 5, "step"), Line("<frozen runpy>", 9, "run")
LOAD, MAIN = Line(USERS, 31, "load"), Line(USERS, 99, "main")


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ((WAIT, FORWARD, TRAINER, FROZEN, LOAD, MAIN), "/home/me/train.py:31 in load"),
        ((WAIT, FORWARD), "torch/nn/module.py:7 in forward"),
        ((WAIT,), "threading.py:320 in wait"),
        ((), ""),
    ],
)
def test_the_innermost_line_is_where_it_stands(lines, where):
    assert Stack(lines).where == where
    many = describe(Stack((WAIT, *(Line(USERS, n, "f") for n in range(200)))))
    assert (many[0], len(many)) == ("/home/me/train.py:0 in f", reasons.MOST_LINES), "the user's come first"


def test_only_the_last_dump_counts_and_what_others_print_in_between_is_passed_over():
    text = "Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n"
    first = text + '  File "/a.py", line 1 in f\n'
    second = text + '  File "/b.py", line 2 in g\nepoch 3\n  File "/b.py", line 9 in main\n'
    (stack,) = parse(first + second)
    assert [str(line) for line in stack.lines] == ["/b.py:2 in g", "/b.py:9 in main"]
    assert parse("no dump") == []
