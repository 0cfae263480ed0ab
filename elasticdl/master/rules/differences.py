"""Members that all wait for one another: which of them differ from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from elasticdl.master.state.suspicion import StackReport

MOST_SHOWN = 8
Kind = TypeVar("Kind", int, str)


def odd_ones(reports: Mapping[int, StackReport]) -> dict[int, str]:
    """Of members that all wait for one another: who does something else than most others, and how it shows.

    It has begun another number of collectives: fewer, or more if it left one out and went on to the next. Else it stands
    elsewhere. If they can't be told apart, as with two in two places, it is all of them; nobody, if nothing differs.
    """
    begun = {worker_id: report.collectives for worker_id, report in reports.items()}
    places = {worker_id: report.where for worker_id, report in reports.items()}
    odd, usual = _minority(begun)
    if odd:
        most = f"and most others {usual}" if usual is not None else "and each another number"
        return {each: f"it has begun {begun[each]} collectives, {most}" for each in odd}
    odd, place = _minority(places)
    return dict.fromkeys(odd, f"most others wait at {place}" if place is not None else "each waits elsewhere")


def examples(odd: Mapping[int, str], reports: Mapping[int, StackReport]) -> dict[int, str]:
    """Those of the odd ones whom people are told of: if there are many, one for each way in which they stand."""
    if len(odd) <= MOST_SHOWN:
        return dict(odd)
    first: dict[StackReport, int] = {}
    for worker_id in odd:
        first.setdefault(replace(reports[worker_id], stack=()), worker_id)
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


def common_place(reports: Sequence[StackReport]) -> str:
    return f", at {reports[0].where}" if reports and len({each.where for each in reports}) == 1 else ""
