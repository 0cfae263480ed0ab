"""What the comparison of the workers' states takes of a step."""

from __future__ import annotations

import functools
import time
from typing import Any

from benchmarks.loops.meter import Meter
from elasticdl.elastic.training.state_check import StateCheck

PARTS = ("begin", "ballot", "voted", "step_made")


def time_checks(meter: Meter) -> None:
    """From now on the meter knows how long they take: the `check` of a step."""
    for name in PARTS:
        setattr(StateCheck, name, _timed(getattr(StateCheck, name), meter))


def _timed(part: Any, meter: Meter) -> Any:
    @functools.wraps(part)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return part(*args, **kwargs)
        finally:
            meter.spend("check", time.perf_counter() - began)

    return timed
