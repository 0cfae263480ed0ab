"""What is refused is refused in one line."""

import pytest

from elasticdl.common.errors import UserError


def refused(words, use, error=UserError):
    """``use()`` raises this error, in which the pattern ``words`` is found; returns its text."""
    with pytest.raises(error, match=words) as told:
        use()
    assert "\n" not in str(told.value)
    return str(told.value)
