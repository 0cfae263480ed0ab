"""The learning rate of each step: the user's own, as the number of workers and the chosen rule make it.

With a fixed global batch only the schedule does anything: the batch does not change, so neither may the learning rate.
What differs between frameworks (setting the rate of an optimizer) is in the twins
(`elasticdl.elastic.torch_kit.torch_state`).
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import World

Scaling = Literal["linear", "sqrt"]
Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class LearningRate:
    """How the learning rate is to go: ``elastic.LearningRate(lambda epoch: 0.1 * 0.5**epoch)`` (docs/library.md).

    Args:
        schedule: a function of the epoch, from 0, that returns the rate. It is asked again whenever the world has changed, so
            that it may use the number of workers; without it the optimizer's own rate holds.
        scaling: with a fixed batch per worker, multiply by the number of workers (Goyal et al. 2017) or its square root
            (Krizhevsky 2014).
        ramp_steps: steps in which the rate moves to its new value after a change of workers; 0: at once.

    Raises:
        UserError: ``scaling`` is another word, or ``ramp_steps`` is below 0.
    """

    schedule: Schedule | None = None
    _: KW_ONLY
    scaling: Scaling | None = None
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        rules = typing.get_args(Scaling)
        if self.scaling is not None and self.scaling not in rules:
            raise UserError(f"LearningRate(scaling={self.scaling!r}): must be one of {', '.join(rules)}, or None")
        if self.ramp_steps < 0:
            raise UserError(f"LearningRate(ramp_steps={self.ramp_steps}): must be at least 0")


@dataclass(frozen=True, slots=True)
class RateState:
    """What the next rate depends on besides the rules; part of the training state, as `Progress` is."""

    value: float = 0.0  # in the last step
    workers: int = 0  # in the last step; 0 before the first
    ramp_start: float = 1.0  # factor with which the last change of workers began
    ramp_step: int = 0  # last step before that change


class RateControl:
    """Gives each step its rate. Only `made` moves `state` on, so a step that is torn leaves no trace."""

    def __init__(self, rules: LearningRate, base: float, *, fixed_batch: bool) -> None:
        """``base``: the optimizer's own rate. ``fixed_batch``: the global batch stays when workers come and go.

        Raises:
            UserError: the rules correct for a growth of the batch that does not happen.
        """
        if fixed_batch and rules.scaling is not None:
            raise UserError(
                f"LearningRate(scaling={rules.scaling!r}) corrects for a global batch that grows with the workers, but "
                "the global batch size is fixed: leave one out"
            )
        self.state = RateState()
        self._rules = rules
        self._base = base
        self._asked: tuple[int, int] | None = None  # version of the world and epoch that the target is for
        self._target = base
        self._next = self.state

    def at(self, step: int, epoch: int, world: World) -> float:
        """The rate for the step with this number."""
        if self._asked != (world.version, epoch):
            rate = self._base if self._rules.schedule is None else float(self._rules.schedule(epoch))
            self._target = rate * {"linear": world.size, "sqrt": math.sqrt(world.size), None: 1}[self._rules.scaling]
            self._asked = (world.version, epoch)
        state = self.state
        if state.workers not in (0, world.size) and state.value and self._target:
            state = replace(state, ramp_start=state.value / self._target, ramp_step=step - 1)
        # A sudden jump of the learning rate can undo progress (Goyal et al. 2017, gradual warm-up).
        made, steps = max(step - state.ramp_step, 0), self._rules.ramp_steps
        factor = 1.0 if made >= steps else state.ramp_start + (1.0 - state.ramp_start) * made / steps
        self._next = replace(state, value=self._target * factor, workers=world.size)
        return self._next.value

    def made(self) -> None:
        """The step whose rate was asked for last has been made."""
        self.state = self._next
