"""What is refused is refused in one line."""

import re

import pytest

from elasticdl.common.errors import UserError


def refused(words, use, error=UserError):
    """``use()`` raises this error, in which the pattern ``words`` is found; returns its text."""
    with pytest.raises(error, match=words) as told:
        use()
    assert "\n" not in str(told.value)
    return str(told.value)


def require_refusal(error, words, about=""):
    """This is the error of what was refused, in which the pattern ``words`` is found. ``about``: the case."""
    assert isinstance(error, UserError), (about, error)
    assert re.search(words, str(error)), (about, str(error))
    assert "\n" not in str(error), about
