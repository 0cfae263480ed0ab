"""The end of a job: how it will have ended is decided once, and then its workers are seen off.

They are told to leave; those who have not after the grace period are killed; those whom not even that ends within
another are done without.
"""

from __future__ import annotations

from elasticdl.master.core.fleet import Fleet
from elasticdl.master.core.instructions import (
    EndJob,
    Instruction,
    KillWorker,
    Outcome,
    Record,
    StopWorkers,
    TerminateWorker,
)
from elasticdl.master.core.settings import Settings
from elasticdl.master.core.workers import WorkerState


class Ending:
    """``outcome`` if it was decided before; it has to be decided again once it is known who is left."""

    def __init__(self, fleet: Fleet, settings: Settings, outcome: Outcome | None) -> None:
        self._fleet = fleet
        self._settings = settings
        self._deadline = 0.0  # by when they are killed and, once killed, given up
        self._killed = False
        self.outcome = outcome

    def decide(self, outcome: Outcome, now: float) -> list[Instruction]:
        """This is how the job ends: tell everybody to leave."""
        self.outcome = outcome
        self._deadline = now + self._settings.stop_grace
        out: list[Instruction] = []
        told: list[int] = []
        for worker in self._fleet.workers.values():
            # One that is draining may be training on until its replacement has its state.
            if worker.state in (WorkerState.RUNNING, WorkerState.DRAINING) and not (worker.finished or worker.failure):
                told.append(worker.worker_id)
            elif worker.state is WorkerState.STARTING and self._settings.own_program:
                out.append(TerminateWorker(worker.worker_id, outcome.reason))
            elif worker.state in (WorkerState.PENDING, WorkerState.STARTING) and not worker.finished:
                out.append(KillWorker(worker.worker_id, outcome.reason))
        self._fleet.dismiss(outcome.reason)
        return [StopWorkers(tuple(told), outcome.reason, outcome.checkpoint), *out] if told else out

    def press(self, now: float) -> list[Instruction]:
        """Kill those who have overstayed; do without those who can't even be killed."""
        if now < self._deadline:
            return []
        grace = f"{self._settings.stop_grace:g} s"
        if not self._killed:
            return self.kill(f"had not left {grace} after it was to", now)
        left, self._fleet.workers = sorted(self._fleet.workers), {}
        return [Record("warning", {"message": f"workers {left} are still there {grace} after they were killed"})]

    def kill(self, reason: str, now: float) -> list[Instruction]:
        """Everybody, at once."""
        self._killed, self._deadline = True, now + self._settings.stop_grace
        return [KillWorker(worker_id, reason) for worker_id in self._fleet.workers]

    def close(self) -> list[Instruction]:
        """The last instructions, once it is decided and nobody is left; until then none."""
        if self.outcome is None or self._fleet.workers:
            return []
        phase, reason = self.outcome.phase, self.outcome.reason
        return [Record("phase", {"phase": str(phase), "reason": reason}), EndJob(phase, reason, self.outcome.traceback)]
