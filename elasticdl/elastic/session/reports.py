"""What a worker tells the master unasked: heartbeats, and rank 0's steps in bunches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from elasticdl.proto import elasticdl_pb2 as pb

REPORT_SECONDS = 0.2
# More than a rank 0 that is killed can have kept to itself: steps are never much faster than a millisecond.
KEPT_STEPS = 1024


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step on one global batch, as every member has seen it; ``loss`` is the mean over the global batch."""

    step: int
    epoch: int
    loss: float
    samples: int
    learning_rate: float
    seconds: float
    world_version: int
    total_samples: int
    ends_epoch: bool
    total_steps: int
    total_epochs: int


class Reports:
    """A thread that beats; the training thread only leaves numbers here.

    Every worker keeps its last steps and rank 0 sends them. What a rank 0 that is killed did not come to send, the
    next one does, and what a stream may have lost is sent again in the next: the master takes each step once.
    """

    def __init__(self, send: Callable[[pb.WorkerMessage], None]) -> None:
        self._send = send
        self._interval = 0.5
        self._world = 0
        self._progress = 0
        self._waiting = False
        self._steps: deque[StepReport] = deque(maxlen=KEPT_STEPS)
        self._told = (0, 0)  # world and step of the last one that was sent
        self._speaks = False
        self.step = 0
        self._lock = threading.Lock()  # between the training thread and the beat: reports must stay in order
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="elasticdl-heartbeat", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=2.0)
        self.flush()

    def set_interval(self, seconds: float) -> None:
        self._interval = seconds

    def enter(self, world: int, *, speaks: bool) -> None:
        """From now on in this world (0: between worlds); ``speaks`` for the one that reports steps, rank 0."""
        self._world = world
        self._speaks = speaks

    def advance(self, *, waiting: bool) -> None:
        self._progress += 1
        self._waiting = waiting

    def add(self, report: StepReport) -> None:
        with self._lock:
            self._steps.append(report)

    def flush(self) -> None:
        with self._lock:
            if news := self._news():
                self._send(news)

    def again(self) -> pb.WorkerMessage | None:
        """All the steps that were kept, for a stream that follows one in which some may have been lost."""
        with self._lock:
            self._told = (0, 0)
            return self._news()

    def _news(self) -> pb.WorkerMessage | None:
        if not self._speaks:
            return None
        told = self._told
        steps = list(takewhile(lambda report: (report.world_version, report.step) > told, reversed(self._steps)))[::-1]
        if not steps:
            return None
        last = steps[-1]
        self._told = (last.world_version, last.step)
        reports = [_to_proto(step) for step in steps]
        progress = pb.Progress(steps=reports, total_steps=last.total_steps, total_epochs=last.total_epochs)
        return pb.WorkerMessage(progress=progress)

    def _beat(self) -> None:
        last = 0.0
        while not self._closing.wait(min(REPORT_SECONDS, self._interval)):
            self.flush()
            now = time.monotonic()
            if now - last >= self._interval:
                last = now
                beat = pb.Heartbeat(
                    world_version=self._world, step=self.step, progress=self._progress, waiting=self._waiting
                )
                self._send(pb.WorkerMessage(heartbeat=beat))


def _to_proto(report: StepReport) -> pb.StepReport:
    return pb.StepReport(
        step=report.step,
        epoch=report.epoch,
        loss=report.loss,
        samples=report.samples,
        learning_rate=report.learning_rate,
        seconds=report.seconds,
        world_version=report.world_version,
        total_samples=report.total_samples,
        ends_epoch=report.ends_epoch,
    )
