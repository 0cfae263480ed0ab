"""GPUs in use over time, from a watch of the pods: a GPU is in use from its pod's binding to its pod's end."""

from __future__ import annotations

import contextlib
import csv
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from kubernetes import client

from benchmarks.experiments.measures import Change
from benchmarks.experiments.pods import Pods, PodWatch, held_gpus, owner_of
from benchmarks.processes import Failed

Result = TypeVar("Result")
COLUMNS = ("time", "owner", "gpus")
LISTED_SECONDS = 30.0


class GpuSeries:
    """Follows a namespace while its context lasts; time 0 is when it was entered.

    Every change is a line of the CSV at once, so that whatever interrupts an experiment leaves the series up to there.
    """

    def __init__(self, core: client.CoreV1Api, namespace: str, path: Path) -> None:
        self._path = path
        self._pods: Pods | None = None
        self._held: Counter[str] = Counter()
        self._changes: list[Change] = []
        self._failure = ""
        self._changed = threading.Condition()
        self._watch = PodWatch(core, namespace, self._become)

    def __enter__(self) -> Self:
        """Returns when it sees the pods.

        Raises:
            Failed: the cluster does not answer.
        """
        self._lines = self._path.open("w", newline="")
        self._table = csv.writer(self._lines)
        self._write(*COLUMNS)
        self.epoch, self._began = time.time(), time.monotonic()
        self._watch.__enter__()
        try:
            self.wait(lambda pods: True, LISTED_SECONDS, "the list of pods")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        with contextlib.suppress(OSError):  # what can't be written was told
            self._lines.close()

    def now(self) -> float:
        return time.monotonic() - self._began

    @property
    def changes(self) -> list[Change]:
        """So far."""
        with self._changed:
            return list(self._changes)

    def wait(self, ready: Callable[[Pods], Result], seconds: float, what: str) -> Result:
        """Until ``ready`` returns something true of the pods, by name; return that.

        Raises:
            Failed: it did not in time, or the series can't be written.
        """

        def look() -> Result | bool | None:
            if self._failure:
                return True
            return ready(self._pods) if self._pods is not None else None

        with self._changed:
            found = self._changed.wait_for(look, seconds)
            if self._failure:
                raise Failed(self._failure)
            if not found:
                phases = {name: pod.get("status", {}).get("phase") for name, pod in (self._pods or {}).items()}
                raise Failed(f"{what}: not within {seconds:g} s; the pods: {phases}")
            return cast(Result, found)

    def _become(self, pods: Pods) -> None:
        """In the watch's thread."""
        now = self.now()
        held: Counter[str] = Counter()
        for pod in pods.values():
            held[owner_of(pod)] += held_gpus(pod)
        with self._changed:
            for owner in sorted(held.keys() | self._held.keys()):
                if held[owner] != self._held[owner]:
                    self._changes.append(Change(now, owner, held[owner]))
                    self._write(f"{now:.3f}", owner, held[owner])
            self._pods, self._held = pods, held
            self._changed.notify_all()

    def _write(self, *row: object) -> None:
        try:
            self._table.writerow(row)
            self._lines.flush()
        except OSError as error:  # told to whoever waits; this thread goes on watching
            self._failure = f"{self._path}: {error.strerror}"


def read_series(path: Path) -> list[Change]:
    """What was written so far."""
    with path.open(newline="") as lines:
        return [Change(float(row["time"]), row["owner"], int(row["gpus"])) for row in csv.DictReader(lines)]
