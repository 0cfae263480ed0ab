"""A job of some system, which one worker leaves or joins at a time. Pauses are those of the survivors, from their step logs."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from benchmarks.peers.systems import Peer
from benchmarks.processes import Processes, wait_until
from benchmarks.steps import Gap, Step, StepLogs, gap_between, split_at

START_SECONDS = 180.0
EVENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PeerChange:
    """One change; ``restarted``: survivors that went on in a new process."""

    event: str
    before: int
    after: int
    gap: Gap
    restarted: int


class PeerRun:
    """One job, which one worker leaves or joins at a time. ``size``: how many there are to be now; ``members``: the processes of
    those that had settled.
    """

    def __init__(self, peer: Peer, processes: Processes) -> None:
        self._peer = peer
        self._processes = processes
        self.members: set[int] = set()
        self.logs = StepLogs(processes.folder)
        self.size = 0

    def start(self, model: str, workers: int) -> None:
        self.size = workers
        self._peer.start(model, workers, self._processes)

    def settle(self, steps: int, seconds: float = 0.0) -> list[Step]:
        """Wait until all train together, for at least so long and so many steps; returns the steps of one of them."""
        since = time.monotonic()

        def steady() -> bool:
            self.members = self.logs.active(self.size, since, steps)
            return time.monotonic() - since > seconds and len(self.members) == self.size

        wait_until(steady, START_SECONDS, f"steady training with {self.size} workers")
        return self.logs.steps[min(self.members)]

    def lose(self, event: str, number: signal.Signals) -> PeerChange:
        """Take one of those that had settled, by a signal."""
        since = time.monotonic()
        victim = self._peer.remove(number, self.members)
        self.size -= 1
        return self._collect(event, self.members - {victim}, since, self.size + 1)

    def gain(self, event: str) -> PeerChange:
        """Bring one more."""
        since = time.monotonic()
        self._peer.add()
        self.size += 1
        return self._collect(event, self.members, since, self.size - 1)

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


def _split(steps: list[Step], since: float, before: int) -> tuple[list[Step], list[Step]]:
    """By the first step of any other size: some survivors may go on before the others are with them."""
    return split_at(steps, since, [step.size != before for step in steps])
