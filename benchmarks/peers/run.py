"""Taking workers from a peer's job and giving them back, and measuring the survivors' pauses from the step logs."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

from benchmarks.peers.port import Peer, PeerChange
from benchmarks.processes import Processes, wait_until
from benchmarks.steps import Step, StepLogs, gap_between, ordinary_step, split_at

LOSSES = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL}
SETTLED_STEPS = 5
SETTLED_SECONDS = 1.0
START_SECONDS = 180.0
EVENT_SECONDS = 120.0
# Peers that go back to a recovery point have one each so many steps; events come at a random place between two.
RECOVERY_STEPS = 20


def run_peer(peer: Peer, model: str, workers: int, repetitions: int, processes: Processes) -> Iterator[PeerChange]:
    """Lose a worker by each signal and get one back, ``repetitions`` times.

    Raises:
        Failed: the peer did not come through in time.
    """
    logs, rng = StepLogs(processes.folder), random.Random(workers)
    peer.start(model, workers, processes)
    for _ in range(repetitions):
        for event, number in LOSSES.items():
            pids = _settle(logs, workers, rng)
            now = time.monotonic()
            victim = peer.remove(number, pids)
            yield _collect(logs, event, pids - {victim}, now, workers - 1)
            pids = _settle(logs, workers - 1, rng)
            now = time.monotonic()
            peer.add()
            yield _collect(logs, "grow", pids, now, workers)


def _settle(logs: StepLogs, size: int, rng: random.Random) -> set[int]:
    """Wait until so many workers train together, then for a random part of the way to the next recovery point."""
    since = time.monotonic()

    def steady() -> bool:
        long_enough = time.monotonic() - since > SETTLED_SECONDS
        return long_enough and len(logs.active(size, since, SETTLED_STEPS)) == size

    wait_until(steady, START_SECONDS, f"steady training with {size} workers")
    pids = logs.active(size, since, SETTLED_STEPS)
    time.sleep(rng.random() * RECOVERY_STEPS * ordinary_step(logs.steps[min(pids)]))
    return pids


def _collect(logs: StepLogs, event: str, survivors: set[int], since: float, size: int) -> PeerChange:
    before = size - 1 if event == "grow" else size + 1
    wait_until(lambda: len(logs.active(size, since, 1)) >= size, EVENT_SECONDS, f"{event}: {size} workers")
    kept = survivors & logs.active(size, since, 1)
    if kept == survivors:
        halves = [_split(logs.steps[pid], since, size) for pid in survivors]
    else:
        last = max((logs.steps[pid] for pid in survivors), key=lambda steps: steps[-1].time)
        everybody = sorted((step for steps in logs.steps.values() for step in steps), key=lambda step: step.time)
        old = [step for step in last if step.size == before]
        halves = [(old, _split(everybody, old[-1].time, size)[1])]
    return PeerChange(event, before, size, gap_between(halves, since), restarted=len(survivors - kept))


def _split(steps: list[Step], since: float, size: int) -> tuple[list[Step], list[Step]]:
    return split_at(steps, since, [step.size == size for step in steps])
