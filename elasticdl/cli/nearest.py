"""The nearest match to a name that does not exist, for the end of an error's line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wrong: str, right: Iterable[str], mark: str = "") -> str:
    """``did you mean X?``, or the whole choice when nothing is near; ``mark`` is put before each name."""
    names = list(right)
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {mark}{near[0]}?"
    return f"there are {', '.join(mark + name for name in names)}" if names else "there are none"
