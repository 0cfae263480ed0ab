"""How many workers a job may have: the one place that says which ranges are allowed, at submission and by `scale`."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

# Each has a record in the master's memory and a line in every status, whether there is a place for it or not.
MOST_WORKERS = 10_000


class WorkerRange(BaseModel):
    """How many workers a job may have, both ends included."""

    model_config = ConfigDict(frozen=True)  # a later version's state may say more

    minimum: int = Field(ge=1, le=MOST_WORKERS)
    maximum: int = Field(ge=1, le=MOST_WORKERS)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(
                f"{self.minimum}-{self.maximum}: the minimum is above the maximum; write MIN-MAX, as in 2-4"
            )
        return self

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}-{self.maximum}"


def parse_worker_range(value: object) -> object:
    """Accept ``4``, ``"4"`` and ``"2-4"``; anything else is left for the type check to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(value))
    if not match:
        raise ValueError(f"{value!r} is neither a number nor MIN-MAX, as in 2-4")
    return WorkerRange(minimum=int(match[1]), maximum=int(match[2] or match[1]))


Workers = Annotated[WorkerRange, BeforeValidator(parse_worker_range), PlainSerializer(str)]


def why_not_in_range(workers: WorkerRange, *, gang: bool, queue: str, submitted: WorkerRange | None = None) -> str:
    """Why a job may not have so many workers, in one line; empty if it may.

    ``submitted``: what a job that is there was submitted with.
    """
    if gang and queue and submitted not in (None, workers):
        # Kueue deletes pods beyond the size that a group was made with, and holds back a group that lacks some.
        return f"the gang in --queue {queue} was submitted with {submitted} workers, which can't be changed: submit another job"
    if gang and workers.minimum != workers.maximum:
        return f"--gang trains with all workers or none: give one number of workers, not {workers}"
    return ""
