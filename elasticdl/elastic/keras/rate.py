"""The learning rate by Keras's schedules of the epoch, in a training whose number of workers changes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.training.state import TrainingState

KEPT = ("before", "factor", "epoch", "asked", "answer")


class KerasRate:
    """The rate by a schedule of the epoch; elastic training asks for it anew when the world changes.

    Keras asks a schedule once an epoch, and may hand it the rate so far. All workers do the same here, and a worker that comes
    later is sent the answer of the others. What a callback makes of the rate besides is a factor on the schedule's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._own = float(optimizer.learning_rate)
        self._schedule: Callable[..., float] | None = None
        self._takes_rate = False
        self.before = self._own
        self.factor = 1.0
        self.epoch = -1  # the last one that has begun
        self.asked = -1  # the last epoch that the schedule was asked for
        self.answer = self._own

    def follow(self, schedule: Callable[..., float], *, may_take_rate: bool) -> None:
        """``may_take_rate``: hand it the rate so far, if it takes a second argument."""
        self._schedule = schedule
        self._takes_rate = may_take_rate and _takes_two(schedule)

    @property
    def has_schedule(self) -> bool:
        return self._schedule is not None

    def __call__(self, epoch: int) -> float:
        """Raises UserError if the schedule returned no rate."""
        return self._scheduled(epoch) * self.factor

    def begin_epoch(self, epoch: int) -> None:
        if self.has_schedule:
            self.before = (self._own if self.epoch < 0 else self._scheduled(self.epoch)) * self.factor
            self.factor = 1.0  # a schedule starts from the rate that callbacks have left, or from none
        self.epoch = epoch

    @contextlib.contextmanager
    def watched(self, state: TrainingState) -> Iterator[None]:
        """What callbacks within set the optimizer's rate to stays in force, also if the rate goes by rules."""
        if state.rate is None:
            yield
            return
        before = state.learning_rate
        yield
        after = state.learning_rate
        if after != before and before:
            self.factor *= after / before
            state.rate.ask_again()

    def kept(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in KEPT}

    def load(self, kept: dict[str, float]) -> None:
        for name in KEPT:
            setattr(self, name, kept.get(name, getattr(self, name)))

    def _scheduled(self, epoch: int) -> float:
        if self._schedule is None or self.asked == epoch:
            return self.answer
        rate = self._schedule(epoch, self.before) if self._takes_rate else self._schedule(epoch)
        if isinstance(rate, bool) or not hasattr(rate, "__float__") or np.ndim(rate):
            raise UserError(
                f"LearningRateScheduler: its function gave {rate!r} for epoch {epoch}, counted from 0; it must return the "
                "learning rate, a number"
            )
        self.asked, self.answer = epoch, float(rate)
        return self.answer


def _takes_two(schedule: Callable[..., float]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.0)
    except (TypeError, ValueError):  # a ValueError: some builtins tell nothing about themselves
        return False
    return True
