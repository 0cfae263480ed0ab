"""What the master is told of an error that ends a worker."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from elasticdl.common.errors import UserError
from elasticdl.common.reason import reason
from elasticdl.job import messages as m


def failure_of(error: BaseException, *, users: bool, helps: Callable[[], str] = str) -> m.Failed:
    """``users``: no other worker would do better. ``helps``: gives what helps where the user's code has raised."""
    line = reason(error)
    if isinstance(error, UserError):  # which says all in its line
        return m.failed(line, "", users=users)
    advice = helps()
    trace = "".join(traceback.format_exception(error))
    return m.failed(f"{line}; {advice}" if advice else line, trace, users=users)
