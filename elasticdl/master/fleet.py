"""The processes: which workers to start, replace, let go and give up.

`reconcile` works from levels: it compares how many workers there should be with those there are, so an event that is
lost or comes twice changes nothing. Ids are never used again.

| what became of a worker                         | what the fleet does                                              |
| ----------------------------------------------- | ---------------------------------------------------------------- |
| drained, killed from outside, frozen            | replaces it at once, no count against the job                    |
| crashed                                         | replaces it after a delay that doubles with each crash in a row  |
| three crashed in a row before reaching a world, | the job fails: it would go on like that for ever                 |
|   and no world is running                       |                                                                  |
| too many crashed after having trained           | the job fails; training on for a while clears the count          |
| finished                                        | does not replace it                                              |

A worker that is not ready in time after its start, whether it ever connected or not, is killed and has crashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elasticdl.master.events import ExitCause, WorkerExited
from elasticdl.master.instructions import DrainWorker, Instruction, KillWorker, LaunchWorker, Record

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
_DOUBLINGS = 16
CRASHES_AT_START = 3
CRASHES_IN_TRAINING = 10
# So many steps without a crash clear the count.
STEPS_TO_FORGET_CRASHES = 100


class WorkerState(StrEnum):
    PENDING = "pending"  # asked for; the launcher has no place for it
    STARTING = "starting"  # its process was asked for or runs, and has not connected
    RUNNING = "running"  # has had a session
    DRAINING = "draining"  # told to leave
    CONDEMNED = "condemned"  # given up; its process is being killed


_LIVE = (WorkerState.PENDING, WorkerState.STARTING, WorkerState.RUNNING)


@dataclass(slots=True)
class Worker:
    worker_id: int
    reason: str  # why it is in its state
    state: WorkerState = WorkerState.STARTING
    host: str = ""
    pid: int = 0
    reached_world: bool = False
    finished: bool = False
    ready_by: float | None = None  # until it has asked for a world
    leave_by: float | None = None
    failure: str = ""  # why it has crashed, whatever its exit code says

    @property
    def live(self) -> bool:
        return self.state in _LIVE and not self.finished


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an exit means. ``fatal``, if not empty, is why the job can't go on."""

    cause: ExitCause
    reason: str
    fatal: str = ""


class Fleet:
    def __init__(self, start_timeout: float, drain_grace: float, *, own_program: bool) -> None:
        self._start_timeout = start_timeout
        self._drain_grace = drain_grace
        self._own_program = own_program
        self._next_id = 0
        self._crashes_at_start = 0
        self._crashes_in_training = 0
        self._last_crash_step = 0
        self._held_until: list[float] = []  # one for each replacement that has to wait
        self._left: list[str] = []  # of those not yet replaced
        self.workers: dict[int, Worker] = {}
        self.completed = 0  # finished and gone

    def get(self, worker_id: int) -> Worker | None:
        """None for a worker that is gone, given up, or was never asked for: its events mean nothing any more."""
        worker = self.workers.get(worker_id)
        return None if worker is None or worker.state is WorkerState.CONDEMNED else worker

    @property
    def all_completed(self) -> bool:
        """Every process that ran has finished, and none is left but those without a place."""
        idle = all(w.state is WorkerState.PENDING for w in self.workers.values())
        return self.completed > 0 and idle and not self._held_until

    @property
    def finishing(self) -> bool:
        """A worker whose training is complete still runs."""
        return any(w.finished for w in self.workers.values())

    # ---- what happened ----

    def pending(self, worker_id: int, reason: str) -> list[Instruction]:
        worker = self.get(worker_id)
        if worker is None or worker.state not in (WorkerState.STARTING, WorkerState.PENDING) or worker.pid:
            return []
        worker.state, worker.reason = WorkerState.PENDING, reason
        return [Record("worker_pending", {"worker": worker_id, "reason": reason})]

    def placed(self, worker_id: int, host: str, pid: int, now: float) -> list[Instruction]:
        worker = self.get(worker_id)
        if worker is None or worker.pid:
            return []
        worker.host, worker.pid = host, pid
        if not self._own_program:  # which may do without the library, and then never connects
            worker.ready_by = now + self._start_timeout
        if worker.state is WorkerState.PENDING:
            worker.state = WorkerState.STARTING
        return [Record("worker_started", {"worker": worker_id, "host": host, "pid": pid})]

    def connected(self, worker_id: int, host: str, pid: int, now: float) -> None:
        worker = self.get(worker_id)
        if worker is None:
            return
        worker.host, worker.pid = host, pid  # behind a shell the process that was placed is another one
        if worker.state in (WorkerState.STARTING, WorkerState.PENDING):
            worker.state, worker.reason = WorkerState.RUNNING, ""
            worker.ready_by = worker.ready_by or now + self._start_timeout

    def ready(self, worker_id: int) -> None:
        if worker := self.get(worker_id):
            worker.ready_by = None

    def unready(self, now: float) -> list[int]:
        """Those whose time to get ready is over."""
        return [w.worker_id for w in self.workers.values() if w.live and w.ready_by is not None and now > w.ready_by]

    def reached_world(self, worker_ids: Sequence[int]) -> None:
        self._crashes_at_start = 0
        for worker_id in worker_ids:
            if worker := self.get(worker_id):
                worker.reached_world = True

    def trained(self, step: int) -> None:
        if step - self._last_crash_step >= STEPS_TO_FORGET_CRASHES:
            self._crashes_in_training = 0

    def finished(self, worker_id: int) -> None:
        if worker := self.get(worker_id):
            worker.finished = True

    def leaving(self, worker_id: int, reason: str, now: float) -> list[Instruction]:
        """It was told to leave, by us or by somebody else, and has the grace period for it."""
        worker = self.get(worker_id)
        if worker is None or worker.state is WorkerState.DRAINING or worker.finished:
            return []
        worker.state, worker.reason, worker.leave_by = WorkerState.DRAINING, reason, now + self._drain_grace
        self._left.append(f"worker {worker_id} leaves")
        return [Record("worker_draining", {"worker": worker_id, "reason": reason})]

    def failing(self, worker_id: int, message: str, now: float) -> None:
        """The worker says that it can't go on; it should end by itself."""
        if (worker := self.get(worker_id)) and not worker.failure:
            worker.failure, worker.leave_by = message, now + self._drain_grace

    def condemn(self, worker_id: int, reason: str, *, crashed: bool = False) -> list[Instruction]:
        """Give it up. ``crashed``: others may do no better, so it counts against the job."""
        worker = self.get(worker_id)
        if worker is None:
            return []
        worker.state, worker.reason = WorkerState.CONDEMNED, reason
        if crashed:
            worker.failure = worker.failure or reason
        self._left.append(f"worker {worker_id}: {reason}")
        return [KillWorker(worker_id, reason)]

    def exited(self, event: WorkerExited, now: float, *, step: int, world_runs: bool) -> Verdict | None:
        """None if it was gone already."""
        worker = self.workers.pop(event.worker_id, None)
        if worker is None:
            return None
        cause, reason = self._judge(worker, event)
        if cause is ExitCause.FINISHED:
            self.completed += 1
        elif worker.live:
            self._left.append(f"worker {event.worker_id} {reason}")
        fatal = self._count_crash(worker, reason, now, step, world_runs) if cause is ExitCause.CRASHED else ""
        if worker.finished and self._own_program and event.cause is not ExitCause.CLEAN:
            fatal = f"worker {event.worker_id} {event.cause} after its training was complete: {event.detail}"
        return Verdict(cause, reason, fatal)

    def reopen(self, now: float) -> None:
        """What was finished is not, after all: training goes on, with others in the place of those who believe it is over."""
        self.completed = 0
        for worker in self.workers.values():
            if worker.finished:
                worker.finished, worker.state, worker.reason = False, WorkerState.DRAINING, "finished before the others"
                worker.leave_by = now + self._drain_grace

    def dismiss(self, reason: str) -> None:
        """The job is over: whoever goes now was told to."""
        for worker in self.workers.values():
            if worker.live:
                worker.state, worker.reason = WorkerState.DRAINING, f"the job ends: {reason}"

    # ---- what to do about it ----

    def reconcile(self, maximum: int, precedence: Callable[[], Sequence[int]], now: float) -> list[Instruction]:
        """Launch what is missing, let go what is too much, give up what overstays its leave.

        ``precedence``: workers in the world or waiting for one, those to keep first.
        """
        out: list[Instruction] = []
        for worker in list(self.workers.values()):
            if worker.leave_by is not None and now > worker.leave_by:
                out += self.condemn(worker.worker_id, f"had not left {self._drain_grace:g} s after it was to")
        self._held_until = [time for time in self._held_until if time > now]
        live = [w for w in self.workers.values() if w.live]
        wanted = maximum - self.completed - sum(w.finished for w in self.workers.values())
        for _ in range(wanted - len(live) - len(self._held_until)):
            out += self._launch()
        if len(live) > wanted:
            out += self._let_go(live, wanted, precedence(), f"the job was scaled to at most {maximum}", now)
        return out

    def _launch(self) -> list[Instruction]:
        worker_id, self._next_id = self._next_id, self._next_id + 1
        reason = f"in place of one that left: {self._left.pop(0)}" if self._left else "asked for"
        self.workers[worker_id] = Worker(worker_id, reason)
        return [
            LaunchWorker(worker_id, reason),
            Record("worker_launched", {"worker": worker_id, "reason": reason}),
        ]

    def _let_go(
        self, live: list[Worker], wanted: int, precedence: Sequence[int], reason: str, now: float
    ) -> list[Instruction]:
        place = {worker_id: index for index, worker_id in enumerate(precedence)}
        last = len(place)
        live.sort(key=lambda w: (place.get(w.worker_id, last), _LIVE[::-1].index(w.state), w.worker_id))
        out: list[Instruction] = []
        for worker in reversed(live[max(0, wanted) :]):
            if worker.state is WorkerState.RUNNING:
                out += [DrainWorker(worker.worker_id, reason), *self.leaving(worker.worker_id, reason, now)]
            else:  # it has no session, and nothing to finish
                out += [*self.leaving(worker.worker_id, reason, now), KillWorker(worker.worker_id, reason)]
        self._left.clear()
        return out

    def _judge(self, worker: Worker, event: WorkerExited) -> tuple[ExitCause, str]:
        if worker.finished:
            return ExitCause.FINISHED, "finished"
        if worker.failure:
            return ExitCause.CRASHED, worker.failure
        if worker.state is WorkerState.CONDEMNED:
            return ExitCause.FROZEN, worker.reason
        if worker.state is WorkerState.DRAINING:
            return ExitCause.DRAINED, worker.reason
        if event.cause is not ExitCause.CLEAN:
            return event.cause, f"{event.cause}: {event.detail}" if event.detail else str(event.cause)
        if self._own_program:
            return ExitCause.FINISHED, "finished"
        return ExitCause.CRASHED, "ended without having finished"

    def _count_crash(self, worker: Worker, reason: str, now: float, step: int, world_runs: bool) -> str:
        if worker.reached_world:
            self._crashes_in_training += 1
        else:
            self._crashes_at_start += 1
        self._last_crash_step = step
        in_a_row = min(max(self._crashes_at_start, self._crashes_in_training), _DOUBLINGS)
        self._held_until.append(now + min(LONGEST_DELAY, FIRST_DELAY * 2 ** (in_a_row - 1)))
        if self._crashes_at_start >= CRASHES_AT_START and not world_runs:
            return f"{self._crashes_at_start} workers in a row failed at the start, last worker {worker.worker_id}: {reason}"
        if self._crashes_in_training >= CRASHES_IN_TRAINING:
            return f"{self._crashes_in_training} workers crashed in training, last worker {worker.worker_id}: {reason}"
        return ""
