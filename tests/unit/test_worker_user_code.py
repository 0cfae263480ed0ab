"""What a user is shown of an exception: the own file and line, and none of this package's frames."""

import pytest

from elasticdl.common.errors import UserError
from elasticdl.worker.user_code import blame, users_traceback

CODE = "def outer(inner):\n    return inner()\n\ndef broken():\n    raise ValueError('first\\nsecond')\n"


def raised(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value


def test_without_a_line_of_the_user_what_was_done_is_named_and_errors_of_this_package_pass_unchanged(tmp_path):
    with pytest.raises(UserError, match=r"^reading raised ValueError: "), blame("reading", tmp_path):
        int("x")
    error = UserError("already a line")
    with pytest.raises(UserError) as caught, blame("anything", tmp_path):
        raise error
    assert caught.value is error


def test_the_traceback_begins_with_the_user(tmp_path):
    mine = {}
    (tmp_path / "mine.py").write_text(CODE)
    exec(compile(CODE, str(tmp_path / "mine.py"), "exec"), mine)
    text = users_traceback(raised(lambda: mine["outer"](mine["broken"])), tmp_path)
    frames = [line for line in text.splitlines() if line.startswith("  File")]
    assert [frame.split(", ")[1] for frame in frames] == ["line 2", "line 5"]
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: first\nsecond\n")


def test_a_traceback_without_the_user_is_whole_but_for_this_package(tmp_path):
    text = users_traceback(raised(lambda: int("x")), tmp_path / "elsewhere")
    assert "in raised" in text
    assert "invalid literal" in text
