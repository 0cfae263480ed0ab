"""What a reader of a report must know of its journal, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def unknown_kinds(names: Iterable[str], entries: int) -> str:
    return f"entries of kinds that this version does not know: {entries:,} ({', '.join(sorted(names)[:5])})"


def clocks_went_back(entries: int, seconds: float) -> str:
    return (
        f"entries older than the one before, by up to {seconds:.3g} s, as clocks go back: {entries:,}; they count as of the moment "
        "before"
    )


def not_shown(dropped: Mapping[str, int]) -> Iterator[str]:
    """``dropped``: of each kind, how many."""
    for what, number in dropped.items():
        if number:
            yield f"{number:,} {what} are counted, but not shown one by one"
