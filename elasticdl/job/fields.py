"""The fields of an entry as values that can be trusted: a journal may be of another version, damaged, or made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, OnErrorOmit, PlainValidator, ValidationError

from elasticdl.job.event_catalogue import standing

LONGEST_TEXT = 2000
MOST = 1e15  # seconds, steps, samples: a larger number is made up, and a browser can't count with it
Whole = Annotated[int, Field(gt=-MOST, lt=MOST)]
Count = Annotated[int, Field(ge=0, lt=MOST)]
Seconds = Annotated[float, Field(ge=0, lt=MOST)]
Number = Annotated[float, Field(allow_inf_nan=False)] | None
Text = Annotated[str, PlainValidator(lambda value: ("" if value is None else str(value))[:LONGEST_TEXT])]


class SpeedupRow(BaseModel):
    """A row of ``curve``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    workers: Seconds
    speedup: Seconds
    measured: bool = False


class Fields(BaseModel):
    """Of an entry of any kind (`elasticdl.job.event_catalogue`). What it lacks, and what makes no sense, is as here."""

    model_config = ConfigDict(strict=True, extra="ignore")

    time: Seconds = 0.0
    event: Text = ""
    worker: Whole | None = None
    code: Whole | None = None
    members: list[OnErrorOmit[Whole]] = []
    world: Count = 0
    step: Count = 0
    steps: Count = 0
    steps_torn: Count = 0
    again: Count = 0
    samples: Count = 0
    compared: Count = 0
    compared_workers: Count = 0
    seconds: Seconds = 0.0
    held: Seconds = 0.0
    factor: Seconds = 0.0
    waited: Seconds = 0.0
    slowest: Seconds = 0.0
    # Of a pause: its parts, and their sum.
    notice: Seconds = 0.0
    drain: Seconds = 0.0
    rendezvous: Seconds = 0.0
    init: Seconds = 0.0
    sync: Seconds = 0.0
    first_step: Seconds = 0.0
    total: Seconds = 0.0
    loss: Number = None
    learning_rate: Number = None
    metrics: dict[str, Number] = {}
    curve: list[OnErrorOmit[SpeedupRow]] = []
    replaces: bool = False
    checkpoint: bool = False
    job: Text = ""
    workers: Text = ""
    phase: Text = ""
    path: Text = ""
    reason: Text = ""
    message: Text = ""
    format: Text = ""
    engine: Text = ""
    text: Text = ""
    host: Text = ""
    why: Text = ""
    cause: Text = ""
    kind: Text = ""
    state: Text = ""
    where: Text = ""
    differs: Text = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate(entry)
        except ValidationError as error:
            wrong = {finding["loc"][0] for finding in error.errors()}
            return cls.model_validate({name: value for name, value in entry.items() if name not in wrong})

    @property
    def standing(self) -> str:
        """Of a stuck worker."""
        return standing(vars(self))[:LONGEST_TEXT]

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these fields that the entry has."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}
