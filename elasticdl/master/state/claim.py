"""What one job says to the others of its queue; `elasticdl.master.rules.sharing` says what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from elasticdl.job.spec import MOST_WORKERS

Count = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
# A job that has waited for a place for SKIPPED_AFTER seconds in vain is skipped, and tried again every RETRIED_EVERY seconds.
SKIPPED_AFTER, RETRIED_EVERY = 60.0, 600.0
# A job that is over within so long gets no further place: its workers would start for little, and others would stop for them.
WORTHWHILE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Places, work and gains of a job."""

    job: str
    held: Count  # places; those of workers that leave count until these are gone
    waiting: Count  # workers for which there is no place
    minimum: Count
    wanted: Count  # the most that it would take
    left: Annotated[float, Field(allow_inf_nan=False)]  # seconds of work for one worker; negative if that is not known
    # What the first worker brings, the second, ...: speedup over one. There may be fewer than ``wanted``.
    gains: Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(max_length=MOST_WORKERS)]
    # Seconds in which workers have waited, and it got no place.
    waited: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def runs(self) -> bool:
        """It has its fewest."""
        return self.held >= self.minimum

    @property
    def vain(self) -> bool:
        """It is skipped: it has waited for SKIPPED_AFTER seconds in vain. It is retried every RETRIED_EVERY seconds."""
        return self.waited % RETRIED_EVERY >= SKIPPED_AFTER

    @property
    def hopes(self) -> bool:
        """It does not run yet, and may do so with what others give up."""
        return not (self.runs or self.vain)

    @property
    def is_over_soon(self) -> bool:
        return self.runs and 0 <= self.left < WORTHWHILE_SECONDS * sum(self.gains[: self.held])

    def gain(self, number: int) -> float:
        """Of the worker that is the ``number``-th, from 1."""
        return self.gains[number - 1] if number <= len(self.gains) else 0.0

    def worth(self, number: int, usual: float = 1.0) -> float:
        """What the ``number``-th worker counts for among jobs; ``usual``: the work of a job that does not know what is left."""
        left = self.left if self.left >= 0 else usual
        return self.gain(number) / math.sqrt(max(left, 1.0))

    def describe(self, number: int) -> str:
        left = f"{self.left:.0f} s of work" if self.left >= 0 else "unknown work"
        return f"{self.gain(number):.2f} with {left} left"

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Claim:
        """
        Raises:
            ValueError: it is none; one line.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"claim: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


_ADAPTER = TypeAdapter(Claim)
