"""What happened on the serving side, as it happened: each line is in its file at once."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.experiments.measures import Change

REQUESTS, ROTATION, SCALINGS = "requests.csv", "rotation.csv", "scalings.jsonl"


@dataclass(frozen=True, slots=True)
class Request:
    """``latency`` counts from when it was due, whether or not it could be sent then; ``failure`` is empty if there was none."""

    time: float
    latency: float
    replica: str
    refused: int
    answer: int | None
    failure: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """The autoscaler wants another number of replicas."""

    time: float
    rate: float
    before: int
    replicas: int
    reason: str


@dataclass(slots=True)
class Records:
    """Its methods are called in one thread; ``clock`` counts from the load's beginning."""

    folder: Path
    clock: Callable[[], float] = lambda: 0.0
    requests: list[Request] = field(default_factory=list)
    rotations: list[Change] = field(default_factory=list)
    scalings: list[Scaling] = field(default_factory=list)
    _files: ExitStack = field(default_factory=ExitStack)
    _tables: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for name in (REQUESTS, ROTATION, SCALINGS):
            self._tables[name] = self._files.enter_context((self.folder / name).open("w", newline="", buffering=1))
        self._row(REQUESTS, "time", "latency", "replica", "refused", "answer", "failure")
        self._row(ROTATION, "time", "replicas")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._files.close()

    def request(self, request: Request) -> None:
        self.requests.append(request)
        time, latency, *rest = request.time, request.latency, request.replica, request.refused, request.answer
        self._row(REQUESTS, f"{time:.3f}", f"{latency:.4f}", *rest, request.failure)

    def rotation(self, replicas: int) -> None:
        now = self.clock()
        self.rotations.append(Change(now, "rotation", replicas))
        self._row(ROTATION, f"{now:.3f}", replicas)

    def scaling(self, scaling: Scaling) -> None:
        self.scalings.append(scaling)
        self._tables[SCALINGS].write(json.dumps(asdict(scaling)) + "\n")

    def _row(self, name: str, *values: object) -> None:
        csv.writer(self._tables[name]).writerow(values)
