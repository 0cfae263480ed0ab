"""Marks in the logs of a job of this machine: how long each log was at some moments, and which workers had which rank then.

A worker's log holds what its program prints, and most of these lines have no time. A mark is made whenever the journal grows. By the
marks it is known where a line belongs among the master's lines, and which lines a worker has printed in which world.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LogMark:
    """``sizes``: of the logs that have grown since the last mark, by file name. ``members``: in rank order, if a world was formed at
    this moment. ``whole``: all logs were looked at, and not only those in ``sizes``. ``left``: the worker that has ended, if one has."""

    time: float
    sizes: Mapping[str, int] = field(default_factory=dict)
    members: Sequence[int] = ()
    whole: bool = True
    left: int = -1

    def to_line(self) -> str:
        more = {**({"members": list(self.members)} if self.members else {}), **({} if self.whole else {"whole": False})}
        more |= {"left": self.left} if self.left >= 0 else {}
        return json.dumps({"time": round(self.time, 6), "sizes": dict(self.sizes), **more}, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> LogMark | None:
        """None if the line is no mark, as a disk may have been full."""
        try:
            found = json.loads(line)
            sizes = {str(name): int(size) for name, size in found["sizes"].items()}
            members, left = tuple(map(int, found.get("members", ()))), int(found.get("left", -1))
            return cls(float(found["time"]), sizes, members, found.get("whole", True), left)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
