"""What a model has been trained on, exactly: the chain of steps that it comes from.

Two models that were trained on the same samples in the same steps, each in the same world, are one object, so that they are
compared by identity. In another world a step has another result: its workers sum in another order, which rounds otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Violation(Exception):
    """A promise was broken. ``rule`` is the promise, in words; ``what`` says how it was broken."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
        self.what = what


@dataclass(slots=True, eq=False, repr=False)
class Model:
    """After ``step`` steps. ``seen`` are the samples of the present epoch that it was trained on, a bit each."""

    step: int = 0
    epoch: int = 0
    seen: int = 0
    parent: Model | None = None
    _next: dict[tuple[int, int, int], Model] = field(default_factory=dict)

    def after(self, epoch: int, samples: int, world_version: int) -> Model:
        """The model after a further step on these samples."""
        key = (epoch, samples, world_version)
        if (found := self._next.get(key)) is None:
            seen = samples | (self.seen if epoch == self.epoch else 0)
            found = self._next[key] = Model(self.step + 1, epoch, seen, self)
        return found

    def comes_from(self, other: Model) -> bool:
        """Whether it is the other, or was made from it by further steps."""
        model: Model | None = self
        while model is not None and model is not other and model.step >= other.step:
            model = model.parent
        return model is other

    def other(self) -> Model:
        """Of the same steps, with other weights."""
        return Model(self.step, self.epoch, self.seen, self)

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, {self.seen.bit_count()} samples of it)"


@dataclass(slots=True)
class State:
    """What one worker holds of a training: parameters, what moves with them, and what the user counts."""

    weights: Model
    buffers: Model
    values: Model
    counted: int = 0  # samples, by the user

    def copy(self) -> State:
        return State(self.weights, self.buffers, self.values, self.counted)
