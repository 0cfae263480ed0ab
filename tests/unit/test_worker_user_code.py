"""What a user is shown of an exception: the own file and line, and none of this package's frames."""

import pytest

from elasticdl.common.errors import UserError
from elasticdl.worker.user_code import blame, one_line, place, users_traceback

CODE = "def outer(inner):\n    return inner()\n\ndef broken():\n    raise ValueError('first\\nsecond')\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def mine(folder):
    namespace = {}
    exec(compile(CODE, str(folder / "mine.py"), "exec"), namespace)
    return namespace


def raised(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value


def test_the_innermost_line_of_the_user(mine, folder, monkeypatch):
    monkeypatch.chdir(folder)
    error = raised(lambda: mine["outer"](mine["broken"]))
    assert place(error, folder) == "mine.py:5"
    # A library that the user's code calls is not where the user would look.
    error = raised(lambda: mine["outer"](lambda: int("x")))
    assert place(error, folder) == "mine.py:2"


def test_no_line_of_the_user(folder):
    error = raised(lambda: int("x"))
    assert place(error, folder) == ""
    with pytest.raises(UserError, match=r"^reading raised ValueError: "), blame("reading", folder):
        int("x")


def test_the_traceback_begins_with_the_user(mine, folder):
    def through_us():
        mine["outer"](mine["broken"])

    text = users_traceback(raised(through_us), folder)
    frames = [line for line in text.splitlines() if line.startswith("  File")]
    assert [frame.split(", ")[1] for frame in frames] == ["line 2", "line 5"]
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: first\nsecond\n")


def test_a_traceback_without_the_user_is_whole_but_for_this_package(tmp_path):
    text = users_traceback(raised(lambda: int("x")), tmp_path / "elsewhere")
    assert "in raised" in text
    assert "invalid literal" in text


def test_errors_of_this_package_pass_unchanged(folder):
    error = UserError("already a line")
    with pytest.raises(UserError) as caught, blame("anything", folder):
        raise error
    assert caught.value is error


def test_one_line():
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(KeyError()) == "KeyError"


STRUCTURE = "The structure of `inputs` doesn't match the expected structure.\nExpected: x\nReceived: inputs={'a': 1}"


def wrapped(text):
    return (
        f"Exception encountered when calling Net.call().\n\n\x1b[1m{text}\x1b[0m\n\n"
        "Arguments received by Net.call():\n  • inputs=1"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(wrapped("no such shape")), "ValueError: no such shape"),
        (KeyError(wrapped("right")), "KeyError: right"),
        (
            ValueError(wrapped(STRUCTURE)),
            "ValueError: The structure of `inputs` doesn't match the expected structure: expected: x, received: inputs={'a': 1}",
        ),
        (OSError("{{function_node __wrapped__X_device_/device:CPU:0}} 7 is not in [0, 5) [Op:X] name: "), "OSError: 7 is not in [0, 5)"),
    ],
)  # fmt: skip
def test_one_line_of_keras_and_tensorflow_holds_what_was_said(error, line):
    assert one_line(error) == line
