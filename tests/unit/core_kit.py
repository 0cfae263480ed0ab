"""What the tests of a worker's core share: a core that is checked after each event, and what the training thread does."""

from __future__ import annotations

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy, Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.training_step import Position, Vote, WorkerState
from elasticdl.elastic.core.worker import WorkerCore
from tests.simulation.job_invariants import check_worker

S = WorkerState
ME, OTHER = 3, 5
GLOBAL_BATCH = 20
ORDER = SampleOrder(50, BatchPolicy(GLOBAL_BATCH, None))


def world(version, size=2, rank=0, holders=0):
    """The first so many hold the state."""
    ids = [OTHER] * size
    ids[rank] = ME
    return World.of(version, tuple(Member(each, "h", 0, place < holders) for place, each in enumerate(ids)), rank)


def plan(step):
    """Of the first epoch: 20, 20 and 10 samples."""
    samples = min(GLOBAL_BATCH, ORDER.samples - GLOBAL_BATCH * (step - 1))
    position = GLOBAL_BATCH * (step - 1) + samples
    return StepPlan(0, step, samples, Progress(0, position, step, position), ())


def vote(samples=GLOBAL_BATCH, **said):
    return Vote(**{"leaving": False, "samples": samples, "loss": 0.5, **said})


# What the training thread does, with a worker and without an event.
def bound(progress=None, order=ORDER):
    def bind(worker):
        if worker.core.state not in (S.WAITING, S.CONNECTING, S.LEAVING):  # else that thread is on its way to a world
            worker.core.bind(Position(progress, order=order, keeper=worker))

    return bind


def synced(step=0):
    def come_there(worker):
        if worker.core.state is S.SYNCING:
            worker.core.synced(Progress(step=step))
        worker.do(p.Trigger.SYNCED)

    return come_there


def given(batch, changed=False):
    return lambda worker: worker.core.begin(batch, lambda: changed)


def voted(a_vote):
    return lambda worker: worker.core.voted(a_vote, worker.now)


def made(worker):
    if pause := worker.core.step_made(0.1, worker.now):
        worker.do(p.Said(pause))


def commit(worker):
    if worker.core.commit():
        worker.do(p.WorldLeft("the members voted to leave this world"))


def batches_over(worker):
    worker.core.position.batch = None


def counted(worker):
    worker.core.count_step(worker.now)


MADE = bound()


def entered(version, size=2, step=0, holders=0):
    """From the request to the training function."""
    return [p.WorldPublished(world(version, size, holders=holders)), p.Trigger.CONNECTED, synced(step)]


def step(number, **said):
    batch = plan(number)
    return [given(batch), voted(vote(batch.batch, **said)), made]


class Worker:
    """A core that is checked after each event, what it said and told to do, and what was kept of its state."""

    def __init__(self, *events, **options):
        self.core = WorkerCore(ME, **options)
        self.now = 0.0
        self.out = []
        self.kept = []
        self.do(*events)

    def save(self, scope):
        self.kept.append(scope)

    def restore(self):
        self.kept.append("back")

    def do(self, *events):
        """Returns what follows from the last of them."""
        last = []
        for event in events:
            last = self._tell(event) if isinstance(event, p.Event) else event(self)
            check_worker(self.core)
        return last

    def _tell(self, event):
        """As the training thread does, and what it does then."""
        if event is p.Trigger.READY:
            self.core.position.leave()
        out = self.core.step(event, self.now)
        self.out += out
        for each in out:
            if isinstance(each, p.LeaveWorld):
                self.core.position.undo() if each.broken else self.core.position.leave()
        return out

    def sent(self, kind):
        return [each.message for each in self.out if isinstance(each, p.Send) and isinstance(each.message, kind)]


def training(*events, size=2, **options):
    return Worker(MADE, p.Trigger.READY, *entered(1, size), *events, **options)
