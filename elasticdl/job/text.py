"""How numbers read in lines for people."""

from __future__ import annotations

from collections.abc import Mapping


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number_text(value: float | None) -> str:
    """JSON has no word for a number that is none."""
    return "nan" if value is None else f"{value:.4g}"


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))
