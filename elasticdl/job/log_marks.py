"""The line that a worker prints as it enters a world: `[elasticdl TIME] worker 3 is rank 0 in world 5`.

It stands in the worker's own output, wherever that goes: in a file or in the log of a pod. By these marks it is known what was printed
under which rank, and about when. Only who reads that output himself sees them: the commands leave them out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = r"\[elasticdl ([\d.: -]{23})\] worker (\d{1,18}) is rank (\d{1,18}) in world (\d{1,18})"
_MARK = re.compile(rf"{_FORM}\n".encode())
_IN_TEXT = re.compile(rf"{_FORM}\n")
_END_OF_LINE = re.compile(rf"{_FORM}\Z")
_LONGEST = 128
_BEGINNING = b"[elasticdl "


class WorldMark(NamedTuple):
    when: str  # as `2026-01-31 23:59:59.123`, by the clock of the worker's machine
    worker: int
    rank: int
    world: int

    def to_line(self) -> bytes:
        return f"[elasticdl {self.when}] worker {self.worker} is rank {self.rank} in world {self.world}\n".encode()


def split_at_mark(printed: bytes) -> tuple[bytes, WorldMark | None, bytes]:
    """What comes before the first mark, that mark, and the rest. Without a mark the rest may be the beginning of one."""
    if found := _MARK.search(printed):
        return printed[: found.start()], _mark(*(each.decode() for each in found.groups())), printed[found.end() :]
    at = max(printed.rfind(b"["), printed.rfind(b"\n") + 1, len(printed) - _LONGEST)
    begun = printed[at : at + len(_BEGINNING)]
    if begun and _BEGINNING.startswith(begun):
        return printed[:at], None, printed[at:]
    return printed, None, b""


def unmarked(line: str) -> tuple[str | None, WorldMark | None]:
    """A line of a log, without its end: what there is of it but for a mark, with which it may end, and that mark."""
    if (found := _END_OF_LINE.search(line)) is None:
        return line, None
    return line[: found.start()] or None, _mark(*found.groups())


def without_marks(text: str) -> str:
    return _IN_TEXT.sub("", text)


def _mark(when: str, *numbers: str) -> WorldMark:
    return WorldMark(when, *map(int, numbers))
