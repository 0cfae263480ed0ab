"""What a process that has ended by an exception has said of it, read from what it has printed."""

import subprocess
import sys

import pytest

from elasticdl.common.reason import last_exception, last_line

TORCHRUN = 'the script is written for torchrun: docs/migration.md has under "From torchrun" what becomes of each line'
NESTED = """
import json
def load(text):
    return json.loads(text)
try:
    {}["x"]
except KeyError:
    load("")
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ValueError('no such file\\nin there')", "train.py:1: ValueError: no such file"),
        ("raise KeyboardInterrupt", "train.py:1: KeyboardInterrupt"),
        ("assert 1 > 2", "train.py:1: AssertionError"),
        (NESTED, "train.py:4: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("x = (", "train.py:1: SyntaxError: '(' was never closed"),
        ("import os\nos.environ['LOCAL_RANK']", f"train.py:2: KeyError: 'LOCAL_RANK'; {TORCHRUN}"),
        (
            "raise ValueError('rendezvous: environment variable RANK expected, but not set')",
            f"train.py:1: ValueError: rendezvous: environment variable RANK expected, but not set; {TORCHRUN}",
        ),
    ],
)
def test_what_python_says_in_the_end_is_told_with_the_users_line(tmp_path, monkeypatch, code, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(code)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    output = subprocess.run([sys.executable, str(tmp_path / "train.py")], **both, text=True, check=False).stdout
    assert last_exception(f"step 1\n{output}") == told


def test_an_exception_that_was_caught_long_before_the_end_is_none():
    logged = (
        'Traceback (most recent call last):\n  File "/a/train.py", line 3, in <module>\n    f()\nValueError: once\n'
    )
    assert last_exception(logged) == "/a/train.py:3: ValueError: once"
    assert last_exception(logged + "step\n" * 30) == ""
    assert last_exception("step 1\nstep 2\n") == last_exception("") == ""
    assert last_exception(logged.rpartition("ValueError")[0]) == ""


def test_the_last_line_that_was_said():
    assert last_line("usage: a.py\na.py: error: no such option\n\n") == "a.py: error: no such option"
    assert last_line("") == ""
