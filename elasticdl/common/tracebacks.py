"""The exception that has ended a process, read from what the process has printed."""

from __future__ import annotations

import re

from elasticdl.common.reason import with_help
from elasticdl.common.stacks import Line

# What is printed after the exception that ends a process, by functions for its exit; an earlier one was caught.
LINES_AFTER = 20
_BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<number>\d+)(?:, in (?P<function>.*))?')
_ERROR = re.compile(r"(?:[\w.]+\.)?(?P<type>[A-Z]\w*)(?:: (?P<said>.*))?")


def last_exception(output: str) -> str:
    """``FILE:LINE: TYPE: WHAT IT SAYS; WHAT HELPS`` of the last traceback, as of `elasticdl.common.reason.reason`; empty if there is none."""
    lines = output.splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.fullmatch(line)]
    if not frames:
        return ""
    end = next((number for number in range(frames[-1] + 1, len(lines)) if lines[number][:1].strip()), None)
    error = _ERROR.fullmatch(lines[end]) if end is not None and len(lines) - end <= LINES_AFTER else None
    if error is None:
        return ""
    begin = max((number for number in range(frames[-1]) if lines[number] == _BEGINS), default=0)
    users = [line for number in frames if number >= begin and (line := _line(lines[number])).is_users]
    place = f"{str(users[-1]).partition(' in ')[0]}: " if users else ""
    said = f"{error['type']}: {error['said']}" if error["said"] else str(error["type"])
    return place + with_help(said)


def last_line(output: str) -> str:
    """The last that was said; empty if nothing was."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def _line(text: str) -> Line:
    found = _FRAME.fullmatch(text)
    assert found is not None, "it is a frame"
    return Line(found["path"], int(found["number"]), found["function"] or "")
