"""Where workers stand that do not move: what they, or their launchers, have told of it, compared and put into words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from elasticdl.common.reach import NOT_REACHED, last_problem
from elasticdl.common.stacks import describe, parse

MOST_SHOWN = 8
Kind = TypeVar("Kind", int, str)


class Why(StrEnum):
    """A worker has to show where it stands."""

    STUCK = "stuck"
    LATE = "not ready"
    SILENT = "no heartbeat"
    UNREACHED = NOT_REACHED
    ABSENT = "not connected"  # a user's own program, which may do without a session
    OVER = "runs on after its training"
    WAITS = "waits for the others, as they do"


@dataclass(frozen=True, slots=True)
class Standing:
    where: str = ""  # as in train.py:31 in load
    stack: tuple[str, ...] = ()
    moves: bool = False  # its stack was seen to change, so it does something
    collectives: int = 0  # that it has begun in its world
    state: str = ""  # of its process, if that is why it can't move
    itself: bool = False  # it has told this itself
    unreached: bool = False  # its log says that it does not reach the master

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> Standing:
        """By the worker itself."""
        last = [f"last collectives: {', '.join(fields.get('last_collectives', ()))}"]
        stack = (*fields.get("stack", ()), *(last if fields.get("last_collectives") else ()))
        moves, begun = bool(fields.get("moves")), int(fields.get("collectives", 0))
        return cls(str(fields.get("where", "")), stack, moves, begun, itself=True)

    @classmethod
    def found(cls, text: str, state: str) -> Standing:
        """By the launcher: ``text`` with what `faulthandler` and the worker have written, ``state`` if the process can't run."""
        stacks, problem = parse(text), last_problem(text)
        state = f"at {problem}" if problem else state
        if not stacks:
            return cls(state=state, unreached=bool(problem))
        stack = tuple(describe(stacks[0], stacks[1:]))
        return cls(stacks[0].where, stack, state=state, unreached=bool(problem))

    def __str__(self) -> str:
        """To be put after what is wrong; empty if nothing is known."""
        return "".join([f", {self.state}" if self.state else "", f", at {self.where}" if self.where else ""])


@dataclass(slots=True)
class Suspicion:
    """Of a worker, from the moment at which it was asked where it stands."""

    why: Why
    asked: float  # when it was asked last
    standing: Standing | None = None  # as known last
    answered: bool = False  # by it, or by its launcher, since it was asked last
    launcher_asked: bool = False  # likewise
    is_due: bool = False  # it is to be named though its stack moves
    named: Standing | None = None  # what people were told last

    @property
    def answers(self) -> bool:
        """It has told itself where it stands when it was asked last."""
        return self.answered and self.standing is not None and self.standing.itself

    @property
    def moves(self) -> bool:
        return self.standing is not None and self.standing.moves

    def __str__(self) -> str:
        return str(self.standing or "")


def odd_ones(standings: Mapping[int, Standing]) -> dict[int, str]:
    """Of members that all wait for one another: who does something else than most others, and how it shows.

    It has begun another number of collectives: fewer, or more if it left one out and went on to the next. Else it stands
    elsewhere. If they can't be told apart, as with two in two places, it is all of them; nobody, if nothing differs.
    """
    begun = {worker_id: standing.collectives for worker_id, standing in standings.items()}
    places = {worker_id: standing.where for worker_id, standing in standings.items()}
    odd, usual = _minority(begun)
    if odd:
        most = f"and most others {usual}" if usual is not None else "and each another number"
        return {each: f"it has begun {begun[each]} collectives, {most}" for each in odd}
    odd, place = _minority(places)
    return dict.fromkeys(odd, f"most others wait at {place}" if place is not None else "each waits elsewhere")


def examples(odd: Mapping[int, str], standings: Mapping[int, Standing]) -> dict[int, str]:
    """Those of the odd ones whom people are told of: if there are many, one for each way in which they stand."""
    if len(odd) <= MOST_SHOWN:
        return dict(odd)
    first: dict[Standing, int] = {}
    for worker_id in odd:
        first.setdefault(replace(standings[worker_id], stack=()), worker_id)
    return {worker_id: odd[worker_id] for worker_id in list(first.values())[:MOST_SHOWN]}


def _minority(kinds: Mapping[int, Kind]) -> tuple[list[int], Kind | None]:
    """Who is not of the commonest kind, and which that is; all and None, if there are several."""
    counts = Counter(kinds.values()).most_common(2)
    if len(counts) < 2:
        return [], None
    (usual, most), (_, second) = counts
    if most == second:
        return list(kinds), None
    return [each for each, kind in kinds.items() if kind != usual], usual


def common_place(standings: Sequence[Standing]) -> str:
    return f", at {standings[0].where}" if standings and len({each.where for each in standings}) == 1 else ""
