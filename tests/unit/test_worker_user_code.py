"""What a user is shown of an exception: the own file and line, and none of this package's frames."""

import pytest

from elasticdl.common.errors import UserError
from elasticdl.worker.user_code import blame, users_traceback

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


def test_no_line_of_the_user(folder):
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
