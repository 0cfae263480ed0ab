"""What a person is told of an exception in one line: never an empty one, and the place in their own code."""

import pytest

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line, reason

GUARD = """
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.

        This probably means that you are not using fork to start your
        child processes.
"""  # as Python's multiprocessing begins it: with an empty line
LOADER = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "train.py", line 9, in __getitem__
    raise ValueError(text)
ValueError: no image
in there
"""


OURS = "from elasticdl.common.errors import UserError\n"


def raised(code, path):
    """What code raises that stands in a file of the user's."""
    path.write_text(code)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        exec(compile(code, str(path), "exec"), {})
    return caught.value


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise ValueError('first\\nsecond')", "train.py:1: ValueError: first"),
        ("x = 1\nassert x > 1", "train.py:2: AssertionError, which says nothing, raised by `assert x > 1`"),
        ("raise RuntimeError('')", "train.py:1: RuntimeError, which says nothing, raised by `raise RuntimeError('')`"),
        ("raise RuntimeError(' \\n\\n  at last\\nmore')", "train.py:1: RuntimeError: at last"),
        ("raise RuntimeError('\\n one\\n two\\n\\n three')", "train.py:1: RuntimeError: one two"),
        ("import json\njson.loads('')", "train.py:2: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("compile('x = ', 'mine.py', 'exec')", "mine.py:1: SyntaxError: invalid syntax (mine.py, line 1)"),
        (f"{OURS}raise UserError('call init first')", "train.py:2: call init first"),
        (f"{OURS}raise UserError('mine.py:7: call init first')", "mine.py:7: call init first"),
    ],
)
def test_a_reason_is_the_place_the_type_and_what_was_said(code, line, script):
    assert reason(raised(code, script)) == line


def test_what_helps_is_said_where_it_is_known(script):
    line = reason(raised(f"raise RuntimeError({GUARD!r})", script))
    assert line == (
        "train.py:1: RuntimeError: An attempt has been made to start a new process before the current process has finished "
        'its bootstrapping phase; put what the script does below `if __name__ == "__main__":`, as processes that load data '
        "import it anew"
    )


def test_what_never_was_in_a_users_file_has_no_place():
    assert reason(ValueError("no")) == "ValueError: no"
    assert reason(ValueError()) == "ValueError, which says nothing"
    assert reason(UserError("")) == "UserError, which says nothing"


STRUCTURE = "The structure of `inputs` doesn't match the expected structure.\nExpected: x\nReceived: inputs={'a': 1}"


def wrapped(text):
    return (
        f"Exception encountered when calling Net.call().\n\n\x1b[1m{text}\x1b[0m\n\n"
        "Arguments received by Net.call():\n  • inputs=1"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(LOADER), "ValueError: no image"),
        (ValueError(wrapped("no such shape")), "ValueError: no such shape"),
        (KeyError(wrapped("right")), "KeyError: right"),
        (
            ValueError(wrapped(STRUCTURE)),
            "ValueError: The structure of `inputs` doesn't match the expected structure: expected: x, received: inputs={'a': 1}",
        ),
        (OSError("{{function_node __wrapped__X_device_/device:CPU:0}} 7 is not in [0, 5) [Op:X] name: "), "OSError: 7 is not in [0, 5)"),
    ],
)  # fmt: skip
def test_one_line_holds_what_was_said(error, line):
    assert one_line(error) == line
