"""Workers about which something seems wrong, and where they stand: what they, or their launchers, have reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticdl.common.stacks import describe, parse


class SuspicionKind(StrEnum):
    """Why a worker is asked where it stands."""

    STUCK = "stuck"
    LATE = "not ready"
    SILENT = "no heartbeat"
    UNREACHED = "no session"
    ABSENT = "not connected"  # a user's own program, which may do without a session
    OVER = "runs on after its training"
    WAITS = "waits for the others, as they do"


@dataclass(frozen=True, slots=True)
class StackReport:
    """Where a worker stands, as it or its launcher has reported."""

    where: str = ""  # as in train.py:31 in load
    stack: tuple[str, ...] = ()
    moves: bool = False  # its stack was seen to change, so it does something
    collectives: int = 0  # that it has begun in its world
    state: str = ""  # of its process, if that is why it can't move
    itself: bool = False  # it has told this itself

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> StackReport:
        """By the worker itself."""
        last = [f"last collectives: {', '.join(fields.get('last_collectives', ()))}"]
        stack = (*fields.get("stack", ()), *(last if fields.get("last_collectives") else ()))
        moves, begun = bool(fields.get("moves")), int(fields.get("collectives", 0))
        return cls(str(fields.get("where", "")), stack, moves, begun, itself=True)

    @classmethod
    def found(cls, text: str, state: str) -> StackReport:
        """By the launcher: ``text`` with what `faulthandler` and the worker have written, ``state`` if the process can't run."""
        stacks = parse(text)
        if not stacks:
            return cls(state=state)
        stack = tuple(describe(stacks[0], stacks[1:]))
        return cls(stacks[0].where, stack, state=state)

    def __str__(self) -> str:
        """To be put after what is wrong; empty if nothing is known."""
        return "".join([f", {self.state}" if self.state else "", f", at {self.where}" if self.where else ""])


@dataclass(slots=True)
class Suspicion:
    """Something seems wrong with a worker: from the moment at which it was asked where it stands."""

    kind: SuspicionKind
    asked: float  # when it was asked last
    report: StackReport | None = None  # the last one
    answered: bool = False  # by it, or by its launcher, since it was asked last
    launcher_asked: bool = False  # likewise
    is_due: bool = False  # it is to be named though its stack moves
    named: StackReport | None = None  # the report that people were shown last

    @property
    def answers(self) -> bool:
        """The worker itself has answered the last question."""
        return self.answered and self.report is not None and self.report.itself

    @property
    def moves(self) -> bool:
        return self.report is not None and self.report.moves

    def __str__(self) -> str:
        return str(self.report or "")
