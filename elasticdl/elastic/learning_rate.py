"""How the learning rate follows the number of workers, when the batch per worker is fixed.

With a fixed global batch none of this applies: the batch does not change, so neither may the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["none", "linear", "sqrt"]


def scale(rule: Rule, workers: int) -> float:
    """Factor on the learning rate of one worker: linear (Goyal et al. 2017) or square root (Krizhevsky 2014)."""
    if rule == "linear":
        return float(workers)
    return math.sqrt(workers) if rule == "sqrt" else 1.0


@dataclass(frozen=True, slots=True)
class Ramp:
    """A factor that moves in a straight line to its new value over some steps after a change.

    A sudden jump of the learning rate can undo progress (Goyal et al. 2017, gradual warm-up).
    """

    start: float
    target: float
    first_step: int
    steps: int

    def at(self, step: int) -> float:
        """The factor for the step with this number."""
        if self.steps == 0 or step >= self.first_step + self.steps:
            return self.target
        done = max(step - self.first_step, 0) / self.steps
        return self.start + (self.target - self.start) * done
