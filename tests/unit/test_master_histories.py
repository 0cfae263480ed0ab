"""Arbitrary histories: whatever workers do, lose, repeat or send late, the rules of the world hold and it forms again.

`Cluster` plays the machine and the workers: it carries out what the job wants and lets each worker answer as it should,
unless it is frozen, stuck or cut off. Hypothesis decides what befalls them.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.common.spec import WorkerRange
from elasticdl.master import events as e
from elasticdl.master import instructions as i
from elasticdl.master.instructions import Phase
from elasticdl.master.job import Job
from elasticdl.master.settings import Settings

TICK = 0.5
PROGRESS_TIMEOUT = 6.0


@dataclass
class Worker:
    worker_id: int
    connected: bool = False
    asked: bool = False
    world: int = 0
    step: int = 0
    has_state: bool = False
    progress: int = 0
    frozen: bool = False
    stuck: bool = False
    orders: list = field(default_factory=list)


class Cluster:
    def __init__(self, minimum, maximum):
        self.limits = WorkerRange(minimum=minimum, maximum=maximum)
        self.job = Job(Settings(self.limits, heartbeat_timeout=4.0, progress_timeout=PROGRESS_TIMEOUT, stop_grace=5.0))
        self.now = 0.0
        self.workers = {}
        self.version = 0
        self.launched = set()
        self.killed = []
        self.said = []

    def post(self, event):
        self.said.append(event)
        for instruction in self.job.step(event, self.now):
            self.carry_out(instruction)

    def carry_out(self, instruction):
        match instruction:
            case i.LaunchWorker(worker_id):
                assert worker_id not in self.launched
                self.launched.add(worker_id)
                self.workers[worker_id] = Worker(worker_id)
            case i.KillWorker(worker_id):
                self.killed.append(worker_id)
            case i.PublishWorld(world, ids) if world.version > self.version:
                self.check(world, ids)
            case i.PublishWorld(world, ids):
                assert world.version == self.version
                assert len(ids) == 1
            case i.AnnounceChange(ids) | i.BreakWorld(ids):
                for worker_id in ids:
                    if worker_id in self.workers:
                        self.workers[worker_id].orders.append(instruction)
            case i.DrainWorker(worker_id):
                if worker_id in self.workers:
                    self.workers[worker_id].orders.append(instruction)

    def check(self, world, ids):
        self.version = world.version
        assert world.worker_ids == ids
        assert len(set(ids)) == len(ids)
        assert self.limits.minimum <= len(ids) <= self.limits.maximum
        members = [self.workers[worker_id] for worker_id in ids]  # fails for one that is gone
        assert all(worker.asked and worker.connected for worker in members)
        assert not set(ids).intersection(self.killed)
        ranks = [(not m.has_state, -m.step if m.has_state else 0) for m in world.members]
        assert ranks == sorted(ranks)
        for worker in members:
            worker.asked, worker.world, worker.has_state = False, world.version, True
            worker.orders.clear()

    # ---- what workers do when left in peace ----

    def live(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for worker_id in self.killed[:]:
                self.exit(worker_id, e.ExitCause.KILLED)
            for worker in list(self.workers.values()):
                if worker.worker_id in self.workers and not worker.frozen:
                    self.act(worker)
            self.post(e.Tick())

    def act(self, worker):
        if not worker.connected:
            worker.connected = True
            self.post(e.WorkerConnected(worker.worker_id, "h", 1, worker.world if not worker.asked else 0))
        if not worker.stuck:
            worker.progress += 1
            self.obey(worker)
        if worker.worker_id in self.workers:
            self.post(e.HeartbeatReceived(worker.worker_id, worker.world, worker.step, worker.progress, False))

    def obey(self, worker):
        orders, worker.orders = worker.orders, []
        if any(isinstance(order, i.DrainWorker) for order in orders):
            self.leave(worker.worker_id)
        elif worker.world == 0 and not worker.asked:
            self.ask(worker, broken=False)
        elif any(order.world_version == worker.world for order in orders) and not worker.asked:
            self.ask(worker, broken=any(isinstance(order, i.BreakWorld) for order in orders))
        elif not worker.asked:
            worker.step += 1

    def ask(self, worker, broken):
        worker.asked = True
        self.post(e.WorkerAsked(worker.worker_id, worker.world, worker.step, worker.has_state, broken))

    # ---- what befalls them ----

    def exit(self, worker_id, cause):
        self.workers.pop(worker_id, None)
        self.killed = [other for other in self.killed if other != worker_id]
        self.post(e.WorkerExited(worker_id, cause, 0 if cause is e.ExitCause.CLEAN else 1))

    def leave(self, worker_id):
        self.post(e.WorkerDraining(worker_id, "told to"))
        self.post(e.WorkerDisconnected(worker_id))
        self.exit(worker_id, e.ExitCause.CLEAN)

    def befall(self, fate, number):
        ids = sorted(self.workers)
        worker = self.workers[ids[number % len(ids)]] if ids else None
        if fate == "wait":
            self.live(number * TICK)
        elif fate == "repeat" and self.said:
            self.repeat(self.said[-1 - number % len(self.said)])
        elif fate == "scale":
            self.limits = WorkerRange(minimum=1 + number % 2, maximum=2 + number % 4)
            self.post(e.ScaleRequested(self.limits))
        elif worker is not None:
            self.strike(fate, worker)

    def strike(self, fate, worker):
        match fate:
            case "kill":
                self.exit(worker.worker_id, e.ExitCause.KILLED)
            case "vanish":  # its connection breaks before its end is known
                worker.connected = False
                self.post(e.WorkerDisconnected(worker.worker_id))
                self.exit(worker.worker_id, e.ExitCause.KILLED)
            case "leave":
                self.leave(worker.worker_id)
            case "freeze" if worker.connected:  # one that hangs at its start has crashed, which may end the job
                worker.frozen = True
            case "stick" if worker.asked or worker.world:
                worker.stuck = True
            case "cut":
                worker.connected = False
                self.post(e.WorkerDisconnected(worker.worker_id))
            case "break" if worker.world and not worker.asked and worker.connected:
                self.ask(worker, broken=True)

    def repeat(self, event):
        """The same event again, late. The lives and deaths of processes are repeated as they are."""
        if isinstance(event, e.WorkerConnected | e.WorkerDisconnected | e.WorkerAsked):
            worker = self.workers.get(event.worker_id)
            if worker is None or isinstance(event, e.WorkerAsked):
                self.post(event)
        elif not isinstance(event, e.ScaleRequested):
            self.post(event)


FATES = ["kill", "vanish", "leave", "freeze", "stick", "cut", "break", "repeat", "scale", "wait", "wait"]
HISTORIES = st.lists(st.tuples(st.sampled_from(FATES), st.integers(0, 12)), max_size=25)


@settings(max_examples=100, deadline=None)
@given(HISTORIES)
def test_the_world_forms_again_after_any_history(history):
    cluster = Cluster(minimum=2, maximum=4)
    cluster.live(2)
    for fate, number in history:
        cluster.befall(fate, number)
        cluster.post(e.Tick())
    cluster.live(60)  # frozen and stuck ones are found and replaced, and nothing else happens
    view = cluster.job.view()
    members = {w.worker_id for w in view.workers if w.state == "member"}
    assert view.phase is Phase.RUNNING
    assert len(members) == cluster.limits.maximum
    assert members == {w.worker_id for w in cluster.workers.values() if w.world == cluster.version and not w.asked}


IDS = st.integers(-1, 6)
SMALL = st.integers(0, 4)
ANYTHING = st.one_of(
    st.just(e.Tick()),
    st.builds(e.WorkerConnected, IDS, st.just("h"), SMALL, SMALL, SMALL),
    st.builds(e.WorkerDisconnected, IDS),
    st.builds(e.HeartbeatReceived, IDS, SMALL, SMALL, SMALL, st.booleans()),
    st.builds(e.WorkerAsked, IDS, SMALL, SMALL, st.booleans(), st.booleans()),
    st.builds(e.WorkerDraining, IDS, st.just("")),
    st.builds(e.WorkerFinished, IDS, SMALL, SMALL, st.just({})),
    st.builds(e.WorkerFailed, IDS, st.sampled_from(e.FailureCause), st.just("why")),
    st.builds(e.WorkerPending, IDS, st.just("full")),
    st.builds(e.WorkerPlaced, IDS, st.just("h"), SMALL),
    st.builds(e.WorkerExited, IDS, st.sampled_from(list(e.ExitCause)[:-3]), SMALL),
    st.builds(e.LauncherFailed, st.just("why")),
    st.builds(
        e.ScaleRequested, st.builds(lambda a, b: WorkerRange(minimum=a, maximum=a + b), st.integers(1, 3), SMALL)
    ),
    st.builds(e.StopRequested, st.just("why"), st.booleans(), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ANYTHING, st.floats(0, 3)), max_size=60), st.booleans())
def test_no_sequence_of_events_is_too_absurd(events, own_program):
    """Nothing raises, versions grow, the job ends at most once, and nothing happens after its end."""
    job = Job(Settings(WorkerRange(minimum=1, maximum=3), own_program=own_program))
    now, version, ended = 0.0, 0, False
    for event, pause in events:
        now += pause
        for instruction in job.step(event, now):
            assert not ended
            if isinstance(instruction, i.PublishWorld):
                assert instruction.world.version >= version
                version = instruction.world.version
            ended = isinstance(instruction, i.EndJob)
        job.view()
