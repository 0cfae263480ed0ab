"""Marks in the logs of a job of this machine: how long each log was at some moments, and which workers had which rank then.

A worker's log holds what its program prints, as it prints it, and most of that has no time. A mark is made whenever the journal grows. So
a line's place among the master's lines is known, and where a worker's lines of one world end and those of the next begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LogMark:
    """``sizes``: of the logs that have grown since the last mark, by the names of their files. ``members``: of a world that was
    formed at this moment, in rank order. ``whole``: all logs were looked at, else only those that are in it."""

    time: float
    sizes: Mapping[str, int] = field(default_factory=dict)
    members: Sequence[int] = ()
    whole: bool = True

    def to_line(self) -> str:
        more = {**({"members": list(self.members)} if self.members else {}), **({} if self.whole else {"whole": False})}
        return json.dumps({"time": round(self.time, 6), "sizes": dict(self.sizes), **more}, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> LogMark | None:
        """None if it is none, as a disk may have been full."""
        try:
            found = json.loads(line)
            sizes = {str(name): int(size) for name, size in found["sizes"].items()}
            return cls(float(found["time"]), sizes, tuple(map(int, found.get("members", ()))), found.get("whole", True))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
