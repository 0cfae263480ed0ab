"""One history: everything that takes part in it, and its course from the first master to the end of the job."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from elasticdl.elastic.core.plan import BatchPolicy, PartOrder, SampleOrder
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.values import Phase
from elasticdl.master.core.worker_record import JobSnapshot
from tests.simulation.checks import Checks
from tests.simulation.clock import Clock
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.collectives import Collectives
from tests.simulation.lineage import Model, Violation
from tests.simulation.masters import Master, Store
from tests.simulation.plan import Kind, Plan
from tests.simulation.process import Process
from tests.simulation.script import Broadcast
from tests.simulation.unlike import Reading, other_order

if TYPE_CHECKING:
    from tests.simulation.trace import Silent, Trace

STARTUP_SECONDS = 0.5
RESTART_SECONDS = 0.3
# Of simulated time, from the last fault to the end of the job: all timeouts one after another, and the training itself.
LIVENESS_SECONDS = 120.0
ENDS = "once the faults stop, the job ends"


class Site:
    def __init__(self, plan: Plan, trace: Trace | Silent) -> None:
        self.plan = plan
        self.trace = trace
        self.clock = Clock()
        draws = (random.Random(plan.seed * 1000 + number) for number in (996, 997, 998, 999))
        self.draw_policy, self.draw_network, self.draw_cluster, self.draw_master = draws
        policy = BatchPolicy(plan.global_batch, plan.worker_batch, plan.micro_batch)
        kind = PartOrder if plan.in_parts else SampleOrder
        self.order = kind(plan.samples, policy, plan.seed % 1000, drop_last=plan.drop_last)
        self.parts: dict[int, int] = {}  # what was put away last under each number: samples, a bit each
        self.origin = Model()
        self.handover: dict[int, Broadcast] = {}  # by number of the process
        self.store = Store()
        # By number of the process.
        self.collectives = [Collectives(self.clock, self.draw_network) for _ in range(plan.processes)]
        self.cluster = SimulatedCluster(self, plan.workers)
        self.checks = Checks(self)
        self.masters: list[Master] = []
        self.limits = WorkerRange(minimum=plan.minimum, maximum=plan.workers)
        self.slow_starts = 0  # of the next workers
        self.other_data, self.other_data_until = Reading.LONGER, 0.0
        self.at_end: list[Kind] = []  # faults that wait for a worker after its last step
        self.ended: Phase | None = None
        self.quiet_from = -100.0  # when the last fault so far is over

    def run(self) -> Phase:
        """How the job has ended; raises `Violation`."""
        self.trace.clock = self.clock
        self.start_master(None)
        latest = self.plan.calm + LIVENESS_SECONDS
        while self.ended is None and self.clock.now < latest and self.clock.advance():
            pass
        if self.ended is None:
            raise Violation(ENDS, self._describe())
        return self.ended

    # ---- what its parts ask of it ----

    def startup(self, worker_id: int) -> float:
        """Seconds from the start of a process to its model."""
        if self.slow_starts and self.clock.now < self.plan.calm:
            self.slow_starts -= 1
            return 100.0
        return STARTUP_SECONDS * (0.5 + self.draw_cluster.random())

    def read_data(self) -> SampleOrder | None:
        """What a worker has that starts now, if it has anything. Before anybody has trained, what all have is the job's."""
        if self.clock.now >= self.other_data_until or not self.checks.has_trained:
            return self.order
        return other_order(self.order, self.other_data)

    def missing(self, model: Model) -> int:
        """Samples of the model's epoch that it should have been trained on, and was not."""
        left = self.plan.samples - model.seen.bit_count()
        largest = self.order.policy.batch_size(self.plan.workers + 2)
        return 0 if self.plan.drop_last and left < largest else left

    @property
    def most(self) -> int:
        """Workers that may train now."""
        running = [master for master in self.masters if master.alive]
        return running[-1].most if running else self.limits.maximum

    def hand_over(self, number: int, given: Broadcast) -> None:
        kept = self.handover.get(number)
        if kept is None or kept.progress.step <= given.progress.step:
            self.handover[number] = given

    def master_for(self) -> Master | None:
        """Whom the master's address leads to: a new master's may take a while to be known everywhere."""
        running = [master for master in self.masters if master.alive]
        if len(running) > 1 and self.draw_network.random() < 0.5:
            return running[0]
        return running[-1] if running else None

    def after_last_step(self, process: Process) -> None:
        from tests.simulation.faults import strike_at_end

        if self.at_end and self.clock.now < self.plan.calm + LIVENESS_SECONDS / 2:
            strike_at_end(self, process, self.at_end.pop(0))

    # ---- masters ----

    def start_master(self, snapshot: JobSnapshot | None) -> None:
        if self.ended is None:
            self.masters.append(Master(self, self.limits, snapshot))
            self.trace.note(f"master {self.masters[-1].generation} starts")

    def master_ended(self) -> None:
        """Unless there is another already, one is started."""
        self.clock.after(RESTART_SECONDS * (0.5 + self.draw_master.random()), self._restart)

    def _restart(self) -> None:
        if not any(master.alive for master in self.masters):
            self.start_master(self.store.saved[-1] if self.store.saved else None)

    def command(self, event: e.Event) -> None:
        """Somebody calls the master."""
        running = [master for master in self.masters if master.alive]
        if running:
            running[-1].post(event)

    def end(self, phase: Phase, reason: str) -> None:
        self.checks.ended(phase, reason)
        self.ended = phase

    def _describe(self) -> str:
        workers = ", ".join(f"worker {each.worker_id} {each.core.state}" for each in self.cluster.processes)
        return f"{LIVENESS_SECONDS:.0f} s after the last one it has not; {workers or 'no worker runs'}"
