"""What runs worker processes: places for some, slow starts, ends with their causes, and reports that come late or twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticdl.master.core import events as e
from elasticdl.master.core.events import ExitCause
from tests.simulation.group import Group
from tests.simulation.process import Process
from tests.simulation.script import life

if TYPE_CHECKING:
    from tests.simulation.site import Site

PLACE_SECONDS = 0.1
KILL_SECONDS = 0.05
REPORT_SECONDS = 0.02
RESYNC_SECONDS = 1.0
TERMINATION_GRACE = 3.5
REJECTING = "n1"

Report = e.WorkerPending | e.WorkerPlaced | e.WorkerExited | e.StacksFound


@dataclass(slots=True)
class _Pod:
    worker_id: int
    away_from: Sequence[str] = ()
    process: Process | None = None  # none: it waits for a place
    exited: e.WorkerExited | None = None
    cause: ExitCause | None = None  # of an end that is under way, if it is not the process's own
    forgotten: bool = False  # its end was reported, and it is deleted


class SimulatedCluster:
    """One launcher, whatever master talks to it: workers outlive masters."""

    def __init__(self, site: Site, places: int) -> None:
        self._site = site
        self._pods: dict[int, _Pod] = {}
        self._places = places
        self.rejects_until = self.evicts_until = 0.0
        self.other_node = True  # beside the one that rejects

    @property
    def processes(self) -> list[Process]:
        """Those that are alive."""
        return [pod.process for pod in self._pods.values() if pod.process and pod.process.alive]

    def set_places(self, places: int) -> None:
        self._places = places
        self._place_pending()

    # ---- what a master asks for ----

    def find(self) -> tuple[tuple[e.FoundWorker, ...], list[e.Event]]:
        """What there is, and what is reported at once after it."""
        found: list[e.FoundWorker] = []
        reports: list[e.Event] = []
        for pod in self._pods.values():
            if pod.forgotten:
                continue
            process = pod.process
            host = process.host if process else ""
            found.append(e.FoundWorker(pod.worker_id, host, 1 if process else 0, over=pod.exited is not None))
            if pod.exited is not None:
                reports.append(pod.exited)
                pod.forgotten = True
        return tuple(found), reports

    def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        pod = self._pods.get(worker_id)
        if pod is None or pod.forgotten:
            self._pods[worker_id] = _Pod(worker_id, away_from)
            self._site.clock.after(self._site.draw_cluster.uniform(0.2, 1.0) * PLACE_SECONDS, self._place_pending)

    def terminate(self, worker_id: int) -> None:
        self.evict(worker_id, ExitCause.KILLED)

    def kill(self, worker_id: int) -> None:
        pod = self._pods.get(worker_id)
        if pod is None or pod.exited:
            return
        if pod.process is None:
            self._exit(pod, e.WorkerExited(worker_id, ExitCause.KILLED, -9, "it had no place yet"))
            return
        pod.process.doomed = True
        if pod.process.core.world.version == 0:  # as it was not ready in time
            self._site.checks.crashed()
        self._site.checks.killed(pod.process)
        after = KILL_SECONDS * self._site.draw_cluster.uniform(0.2, 2.0)
        self._site.clock.after(after, pod.process.end_worker, ExitCause.KILLED, -9)

    def evict(self, worker_id: int, cause: ExitCause) -> None:
        """SIGTERM, and SIGKILL for one that stays."""
        pod = self._pods[worker_id]
        process = pod.process
        if process is not None and process.alive:
            pod.cause = cause
            process.terminate_worker()
            self._site.clock.after(TERMINATION_GRACE, process.end_worker, ExitCause.KILLED, -9)

    def read_stacks(self, worker_id: int) -> None:
        """The answer comes as late as any report, whatever became of the worker."""
        pod = self._pods.get(worker_id)
        if pod is not None and pod.process is not None:
            self._report(pod, e.StacksFound(worker_id, "", "simulated"))

    # ---- what becomes of them ----

    def process_ended(self, process: Process, cause: ExitCause, code: int) -> None:
        pod = self._pods[process.worker_id]
        assert pod.process is process, "an id is used again only when its process is gone"
        if pod.cause is not None and (code or self._site.draw_cluster.random() < 0.5):
            cause = pod.cause
        if cause is ExitCause.CRASHED:
            self._site.checks.crashed()
        self._exit(pod, e.WorkerExited(process.worker_id, cause, code, "simulated"))
        self._site.clock.after(PLACE_SECONDS, self._place_pending)

    def _exit(self, pod: _Pod, exited: e.WorkerExited) -> None:
        pod.exited = exited
        self._site.trace.note(f"the process of worker {pod.worker_id} has ended: {exited.cause}, code {exited.code}")
        self._report(pod, exited)

    def _place_pending(self) -> None:
        taken = len(self.processes)
        for pod in self._pods.values():
            if pod.process is not None or pod.exited is not None:
                continue
            if taken >= self._places:
                self._report(pod, e.WorkerPending(pod.worker_id, "no place"))
            elif self._rejects(pod):
                why = "Pod was rejected: Allocate failed"
                self._exit(pod, e.WorkerExited(pod.worker_id, ExitCause.EVICTED, -9, why, node=REJECTING))
            else:
                taken += 1
                pod.process, *others = self._start(pod.worker_id)
                for process in (pod.process, *others):
                    process.call(process.start)
                self._report(pod, e.WorkerPlaced(pod.worker_id, pod.process.host, 1))
                if self._site.clock.now < self.evicts_until:
                    pod.process.disturbed = True
                    after = PLACE_SECONDS * self._site.draw_cluster.random()
                    self._site.clock.after(after, pod.process.end_worker, ExitCause.EVICTED, 1)

    def _start(self, worker_id: int) -> list[Process]:
        """The processes of a worker, of which the first stands for it."""

        def make(number: int, group: Group | None) -> Process:
            return Process(self._site, worker_id, life, number, group)

        if self._site.plan.processes == 1:
            return [make(0, None)]
        return Group(self._site, worker_id, make).processes

    def _rejects(self, pod: _Pod) -> bool:
        """Whether the scheduler chooses the node that rejects all pods now: it looks the emptiest."""
        avoided = self.other_node and REJECTING in pod.away_from
        return self._site.clock.now < self.rejects_until and not avoided

    def _report(self, pod: _Pod, report: Report) -> None:
        """To whoever is master when it arrives; one that is lost comes with the next full list."""
        site = self._site
        noise, draw = site.plan.noise, site.draw_cluster
        delay = REPORT_SECONDS * draw.random()
        if noise and draw.random() < noise:
            delay = draw.choice((RESYNC_SECONDS, 0.2)) * draw.random()
        if noise and draw.random() < noise:
            site.clock.after(delay + draw.random(), self._deliver, pod, report, site.store.starts)
        site.clock.after(delay, self._deliver, pod, report, site.store.starts)

    def _deliver(self, pod: _Pod, report: Report, generation: int) -> None:
        """A master that has started since finds what there is."""
        for master in self._site.masters:
            if master.hears_launcher and master.generation <= generation:
                master.post(report)
                pod.forgotten = pod.forgotten or isinstance(report, e.WorkerExited)
