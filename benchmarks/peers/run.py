"""Taking workers from a peer's job and giving them back, and measuring the survivors' pauses from the step logs."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

from benchmarks.models import recovery_steps
from benchmarks.peers.port import Peer, PeerChange
from benchmarks.processes import Processes, wait_until
from benchmarks.steps import Step, StepLogs, gap_between, ordinary_step, split_at

LOSSES = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL}
SETTLED_STEPS = 5
SETTLED_SECONDS = 1.0
START_SECONDS = 180.0
EVENT_SECONDS = 120.0


class PeerRun:
    """One job, which one worker leaves or joins at a time. ``size``: how many there are to be now."""

    def __init__(self, peer: Peer, processes: Processes) -> None:
        self._peer = peer
        self._processes = processes
        self._members: set[int] = set()
        self.logs = StepLogs(processes.folder)
        self.size = 0

    def start(self, model: str, workers: int) -> None:
        self.size = workers
        self._peer.start(model, workers, self._processes)

    def settle(self, steps: int, seconds: float = 0.0) -> list[Step]:
        """Wait until all train together, for at least so long and so many steps; returns the steps of one of them.

        Raises:
            Failed: they don't in time.
        """
        since = time.monotonic()

        def steady() -> bool:
            self._members = self.logs.active(self.size, since, steps)
            return time.monotonic() - since > seconds and len(self._members) == self.size

        wait_until(steady, START_SECONDS, f"steady training with {self.size} workers")
        return self.logs.steps[min(self._members)]

    def lose(self, event: str, number: signal.Signals) -> PeerChange:
        """Take one of those that had settled, by a signal.

        Raises:
            Failed: the others did not go on in time.
        """
        since = time.monotonic()
        victim = self._peer.remove(number, self._members)
        self.size -= 1
        return self._collect(event, self._members - {victim}, since, self.size + 1)

    def gain(self, event: str) -> PeerChange:
        """Bring one more.

        Raises:
            Failed: they did not train together in time.
        """
        since = time.monotonic()
        self._peer.add()
        self.size += 1
        return self._collect(event, self._members, since, self.size - 1)

    def _collect(self, event: str, survivors: set[int], since: float, before: int) -> PeerChange:
        size, logs = self.size, self.logs
        wait_until(lambda: len(logs.active(size, since, 1)) >= size, EVENT_SECONDS, f"{event}: {size} workers")
        kept = survivors & logs.active(size, since, 1)
        if kept == survivors:
            halves = [_split(logs.steps[pid], since, before) for pid in survivors]
        else:
            last = max((logs.steps[pid] for pid in survivors), key=lambda steps: steps[-1].time)
            everybody = sorted((step for steps in logs.steps.values() for step in steps), key=lambda step: step.time)
            old = [step for step in last if step.size == before]
            halves = [(old, _split(everybody, old[-1].time, before)[1])]
        return PeerChange(event, before, size, gap_between(halves, since), restarted=len(survivors - kept))


def run_peer(peer: Peer, model: str, workers: int, repetitions: int, processes: Processes) -> Iterator[PeerChange]:
    """Lose a worker by each signal and get one back, ``repetitions`` times, each time at some moment between two
    recovery points.

    Raises:
        Failed: the peer did not come through in time.
    """
    run, rng = PeerRun(peer, processes), random.Random(workers)

    def settle() -> None:
        steps = run.settle(SETTLED_STEPS, SETTLED_SECONDS)
        time.sleep(rng.random() * recovery_steps(model) * ordinary_step(steps))

    run.start(model, workers)
    for _ in range(repetitions):
        for event, number in LOSSES.items():
            settle()
            yield run.lose(event, number)
            settle()
            yield run.gain("grow")


def _split(steps: list[Step], since: float, before: int) -> tuple[list[Step], list[Step]]:
    """By the first step of any other size: some survivors may go on before the others are with them."""
    return split_at(steps, since, [step.size != before for step in steps])
