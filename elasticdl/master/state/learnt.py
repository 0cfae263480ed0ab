"""What a job has learnt of how it scales: for the next master, and in checkpoints for a job that goes on from one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.master.state.speedup import Amount, Observation

FORMAT = 1
# Numbers of workers that are kept: what a cluster keeps of a job has to be small.
MOST_OBSERVATIONS = 32
MATERIAL = 0.05


@dataclass(frozen=True, slots=True)
class Rejection:
    """A number of workers that did not pay."""

    workers: int
    left: Amount  # seconds in which it is not tried again
    backoff: Amount  # seconds in which it was not to be tried; the next time twice as many


@dataclass(frozen=True, slots=True)
class Learnt:
    observations: Annotated[tuple[Observation, ...], Field(max_length=MOST_OBSERVATIONS)] = ()
    rejections: Annotated[tuple[Rejection, ...], Field(max_length=MOST_OBSERVATIONS)] = ()

    def differs(self, other: Learnt) -> bool:
        """Whether workers are to be told it again: other numbers of workers, or another speed."""
        mine, others = ({o.workers: o.seconds for o in each.observations} for each in (self, other))
        rejected, before = ({(r.workers, r.backoff) for r in each.rejections} for each in (self, other))
        if mine.keys() != others.keys() or rejected != before:
            return True
        return any(abs(seconds - others[workers]) > MATERIAL * others[workers] for workers, seconds in mine.items())

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **_ADAPTER.dump_python(self, mode="json")})

    @classmethod
    def from_json(cls, text: str) -> Learnt:
        """
        Raises:
            ValueError: it is none, or one of another version of this package; one line.
        """
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise ValueError(f"it has format {found}, not {FORMAT}")
        try:
            return _ADAPTER.validate_python(content)
        except ValidationError as error:
            raise ValueError(first_finding(error)) from None


_ADAPTER = TypeAdapter(Learnt)
