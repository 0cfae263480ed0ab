"""The processes: which workers to start, replace, let go and give up.

`reconcile` works from levels: it compares how many workers there should be with those there are, so an event that is
lost or comes twice changes nothing. Ids are never used again.

| what became of a worker                         | what the fleet does                                              |
| ----------------------------------------------- | ---------------------------------------------------------------- |
| drained, killed, frozen, preempted, evicted,    | replaces it at once, no count against the job                    |
|   node lost, deleted                            |                                                                  |
| crashed, out of memory                          | replaces it after a delay that doubles with each crash in a row  |
| three crashed in a row before reaching a world, | the job fails: it would go on like that for ever                 |
|   and no world is running                       |                                                                  |
| too many crashed after having trained           | the job fails; training on for a while clears the count          |
| ended with code 0 and never asked for a world   | the job fails: the program does not train with others            |
| finished                                        | does not replace it                                              |

A worker that is not ready in time after its start, whether it ever connected or not, is killed and has crashed. Of
several things that befell one worker the telling one is: what the cluster did, before what the worker said of itself,
before what the master thought of it, before its exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elasticdl.master.core.crashes import Crashes
from elasticdl.master.core.events import ExitCause, FoundWorker, WorkerExited
from elasticdl.master.core.instructions import DrainWorker, Instruction, KillWorker, LaunchWorker, Record
from elasticdl.master.core.snapshot import NO_FLEET, FleetSnapshot, WorkerSnapshot
from elasticdl.master.core.workers import LIVE, Worker, WorkerState

# A launcher that was told to kill may see the worker deleted: that is no news, but these always are.
REPLACEMENT = "in place of one that left: "  # so begins why a worker was launched that is not a further one
_BY_THE_CLUSTER = (ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST)
_CRASHES = (ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY)
_REMEDY = "train in a function below @elastic.run and call it (docs/library.md)"
NEVER_JOINED = (
    "ended with exit code 0 and took no part in the job: each process trains for itself unless the script calls "
    f"elasticdl.elastic.torch.init() (or that of elastic.keras) first; then {_REMEDY}"
)
INIT_ONLY = f"ended with exit code 0 after elastic.init() and has not trained together with others: {_REMEDY}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an exit means. ``fatal``, if not empty, is why the job can't go on, ``warning`` what a person must know."""

    cause: ExitCause
    reason: str
    fatal: str = ""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What an earlier master has left: workers that are gone, those who should come back, and kills to carry out."""

    missing: tuple[int, ...]
    expected: frozenset[int]  # who may be in a world
    kills: tuple[KillWorker, ...]


class Fleet:
    def __init__(
        self, start_timeout: float, drain_grace: float, *, own_program: bool, memory: FleetSnapshot = NO_FLEET
    ) -> None:
        self._start_timeout = start_timeout
        self._drain_grace = drain_grace
        self._own_program = own_program
        self._memory = memory
        self._next_id = memory.next_id
        self._crashes = Crashes(memory.crashes)
        self._left: list[str] = []  # of those not yet replaced
        self._somebody_joined = bool(memory.finished) or any(worker.ready for worker in memory.workers)
        self.workers: dict[int, Worker] = {}
        there = {worker.worker_id for worker in memory.workers}
        self.completed = [worker_id for worker_id in memory.finished if worker_id not in there]  # finished and gone

    @property
    def untouched(self) -> bool:
        """Nothing was ever launched."""
        return self._next_id == 0

    def get(self, worker_id: int) -> Worker | None:
        """None for a worker that is gone, given up, or was never asked for: its events mean nothing any more."""
        worker = self.workers.get(worker_id)
        return None if worker is None or worker.state is WorkerState.CONDEMNED else worker

    @property
    def all_completed(self) -> bool:
        """Every process that ran has finished, and none is left but those without a place."""
        idle = all(w.state is WorkerState.PENDING for w in self.workers.values())
        return bool(self.completed) and idle and not self._crashes.holding

    @property
    def nobody_comes(self) -> bool:
        """All who are not leaving wait for a place."""
        live = [worker for worker in self.workers.values() if worker.live]
        return bool(live) and all(worker.state is WorkerState.PENDING for worker in live)

    @property
    def finishing(self) -> bool:
        """A worker whose training is complete still runs."""
        return any(w.finished for w in self.workers.values())

    # ---- what an earlier master has left ----

    def memory(self) -> FleetSnapshot:
        """What another fleet needs to go on from here."""
        workers = self.workers.values()
        finished = sorted([*self.completed, *(w.worker_id for w in workers if w.finished)])
        each = tuple(
            WorkerSnapshot(w.worker_id, w.state, w.reason, w.reached_world, w.failure, w.ready) for w in workers
        )
        return FleetSnapshot(self._next_id, tuple(finished), self._crashes.memory(), each)

    def adopt(self, found: Sequence[FoundWorker], now: float) -> Adoption:
        """Take up the workers of an earlier master: those that it remembered, and those that are there."""
        remembered = {worker.worker_id: worker for worker in self._memory.workers}
        launched = range(self._memory.next_id)  # of those it has forgotten, as they are gone, there may be pods yet
        there = {
            w.worker_id: w for w in found if not (w.over and w.worker_id in launched and w.worker_id not in remembered)
        }
        for worker_id in sorted({*there, *remembered}):
            seen, known = there.get(worker_id, FoundWorker(worker_id)), remembered.get(worker_id)
            self.workers[worker_id] = self._take_up(seen, known, now)
        self._next_id = max([self._next_id, *(worker_id + 1 for worker_id in there)])
        condemned = [self.workers[worker_id] for worker_id in there if not self.get(worker_id)]
        return Adoption(
            missing=tuple(sorted(set(remembered).difference(there))),
            expected=frozenset(
                w.worker_id
                for w in self.workers.values()
                if w.live and w.host and (w.ready or w.reached_world or w.worker_id not in remembered)
            ),
            kills=tuple(KillWorker(w.worker_id, w.reason) for w in condemned),
        )

    def _take_up(self, found: FoundWorker, known: WorkerSnapshot | None, now: float) -> Worker:
        if known is None:
            state = WorkerState.STARTING if found.host else WorkerState.PENDING
            known = WorkerSnapshot(found.worker_id, state, "found by this master")
        worker = Worker(found.worker_id, known.reason, known.state, found.host, found.pid)
        worker.ready, worker.reached_world = known.ready, known.reached_world
        worker.finished = worker.worker_id in self._memory.finished
        worker.failure, worker.unheard = known.failure, True
        if worker.state is WorkerState.DRAINING or worker.failure:
            worker.leave_by = now + self._drain_grace
        silent = self._own_program and worker.state is WorkerState.STARTING
        if worker.host and not (worker.ready or worker.reached_world or silent):
            worker.ready_by = now + self._start_timeout
        return worker

    # ---- what happened ----

    def pending(self, worker_id: int, reason: str) -> list[Instruction]:
        worker = self.get(worker_id)
        if worker is None or worker.state not in (WorkerState.STARTING, WorkerState.PENDING) or worker.pid:
            return []
        if (worker.state, worker.reason) == (WorkerState.PENDING, reason):
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
        worker.unheard = False
        worker.host, worker.pid = host, pid  # behind a shell the process that was placed is another one
        if worker.state in (WorkerState.STARTING, WorkerState.PENDING):
            worker.state, worker.reason = WorkerState.RUNNING, ""
            self._somebody_joined = True
            worker.ready_by = worker.ready_by or now + self._start_timeout

    def ready(self, worker_id: int) -> None:
        if worker := self.get(worker_id):
            worker.ready, worker.ready_by = True, None

    def unready(self, now: float) -> list[int]:
        """Those whose time to get ready is over."""
        return [w.worker_id for w in self.workers.values() if w.live and w.ready_by is not None and now > w.ready_by]

    def reached_world(self, worker_ids: Sequence[int]) -> None:
        self._crashes.reached_world()
        for worker_id in worker_ids:
            if worker := self.get(worker_id):
                worker.reached_world = True

    def trained(self, step: int) -> None:
        self._crashes.trained(step)

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
            self.completed.append(event.worker_id)
        elif worker.live:
            self._left.append(f"worker {event.worker_id} {reason}")
        fatal = self._misuse(worker, event)
        if cause in _CRASHES and not fatal:
            self._crashes.count(in_training=worker.reached_world, step=step, now=now)
            if verdict := self._crashes.too_many(world_runs=world_runs):
                fatal = f"{verdict}, last worker {event.worker_id}: {reason}"
        warning = ""
        if worker.finished and self._own_program and event.code != 0:
            late = f"worker {event.worker_id} {event.cause.replace('_', ' ')} after its training was complete: {event.detail}"
            if event.cause in _CRASHES:
                fatal = late
            else:
                warning = f"{late}; what its program does after training may not have been done"
        return Verdict(cause, reason, fatal, warning)

    def _misuse(self, worker: Worker, event: WorkerExited) -> str:
        """Why a program that has ended well has not trained, if that is so: no other worker would do better."""
        told_to = worker.state in (WorkerState.DRAINING, WorkerState.CONDEMNED) or worker.unheard
        over = worker.finished or worker.failure or worker.ready or told_to
        if not self._own_program or event.cause is not ExitCause.CLEAN or over:
            return ""
        if worker.state is WorkerState.RUNNING:
            return f"worker {worker.worker_id} {INIT_ONLY}"
        return "" if self._somebody_joined else f"worker {worker.worker_id} {NEVER_JOINED}"

    def reopen(self, now: float) -> None:
        """What was finished is not, after all: training goes on, with others in the place of those who believe it is over."""
        self.completed.clear()
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
        live = [w for w in self.workers.values() if w.live]
        wanted = maximum - len(self.completed) - sum(w.finished for w in self.workers.values())
        for _ in range(wanted - len(live) - self._crashes.held(now)):
            out += self._launch()
        if len(live) > wanted:
            out += self._let_go(live, wanted, precedence(), f"the job was scaled to at most {maximum}", now)
        return out

    def _launch(self) -> list[Instruction]:
        worker_id, self._next_id = self._next_id, self._next_id + 1
        replaces = bool(self._left)
        reason = f"{REPLACEMENT}{self._left.pop(0)}" if replaces else "asked for"
        self.workers[worker_id] = Worker(worker_id, reason)
        return [
            LaunchWorker(worker_id, reason),
            Record("worker_launched", {"worker": worker_id, "reason": reason, "replaces": replaces}),
        ]

    def _let_go(
        self, live: list[Worker], wanted: int, precedence: Sequence[int], reason: str, now: float
    ) -> list[Instruction]:
        place = {worker_id: index for index, worker_id in enumerate(precedence)}
        last = len(place)
        live.sort(key=lambda w: (place.get(w.worker_id, last), LIVE[::-1].index(w.state), w.worker_id))
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
        told = f"{event.cause.replace('_', ' ')}: {event.detail}" if event.detail else event.cause.replace("_", " ")
        if event.cause in _BY_THE_CLUSTER:
            return event.cause, told
        if worker.failure:
            return ExitCause.CRASHED, worker.failure
        if worker.state is WorkerState.CONDEMNED:
            return ExitCause.FROZEN, worker.reason
        if worker.state is WorkerState.DRAINING and event.cause is not ExitCause.DELETED:
            return ExitCause.DRAINED, worker.reason
        if event.cause is not ExitCause.CLEAN:
            return event.cause, told
        if worker.unheard:  # one that had finished would have waited to say so
            return ExitCause.DRAINED, "left while there was no master"
        return ExitCause.CRASHED, "ended with exit code 0 before its training was complete"
