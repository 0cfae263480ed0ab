"""Jobs whose surroundings are played: by a test, event by event (`Yard` and its like), or by themselves (`Cluster`)."""

from dataclasses import dataclass, field

from elasticdl.job import messages as m
from elasticdl.job.journal import KINDS
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings, World
from elasticdl.master.core.worker_record import Snapshot
from tests.simulation.job_invariants import check_job

TICK = 0.5
HEARTBEAT_TIMEOUT = 4.0
RECOVERY_TIMEOUT = 8.0
NEVER = 10**9
START, GRACE, LONG = 600.0, 30.0, 10.0**9


def step(job, event, now):
    """One step, after which all invariants hold."""
    instructions = job.step(event, now)
    check_job(job)
    for instruction in instructions:
        if isinstance(instruction, i.Record):
            assert set(instruction.fields) <= set(KINDS[instruction.event].fields), f"not declared: {instruction}"
    return instructions


def is_a(kind, instruction):
    """Of this kind, or it tells workers something of this kind."""
    return isinstance(instruction, kind) or (isinstance(instruction, i.Tell) and isinstance(instruction.message, kind))


def only(kind, instructions):
    return [instruction for instruction in instructions if is_a(kind, instruction)]


def launched(instructions):
    return [each.worker_id for each in only(i.LaunchWorker, instructions)]


def killed(instructions):
    return [(each.worker_id, each.reason) for each in only(i.KillWorker, instructions)]


class Played:
    """A job with a clock that the test moves."""

    shows = object  # of these kinds `post` returns what comes of events

    def __init__(self, minimum, maximum, **settings):
        self.settings = Settings(WorkerRange(minimum=minimum, maximum=maximum), **settings)
        self.job, self.now, self.out = Job(self.settings), 0.0, []

    def post(self, *events):
        new = [instruction for event in events for instruction in step(self.job, event, self.now)]
        self.out += new
        return only(self.shows, new)

    def records(self, event):
        return [record.fields for record in only(i.Record, self.out) if record.event == event]

    @property
    def warnings(self):
        return [fields["message"] for fields in self.records("warning")]

    @property
    def causes(self):
        return [fields["cause"] for fields in self.records("worker_left")]

    @property
    def phase(self):
        return self.job.phase

    @property
    def reason(self):
        return self.job.reason

    def remark(self, worker_id):
        return next(each.remark for each in self.job.workers if each.worker_id == worker_id)

    def place(self, worker_id, node=""):
        return self.post(e.WorkerPlaced(worker_id, "h", 1, node))

    def finish(self, *ids, together=False):
        return self.post(*(e.FromWorker(worker_id, m.Finished(9, 1, {}, together)) for worker_id in ids))

    def scale(self, minimum, maximum):
        return self.post(e.ScaleRequested(WorkerRange(minimum=minimum, maximum=maximum)))


class Run(Played):
    """The hearts of its workers beat; it shows all but what goes into the journal."""

    def __init__(self, minimum=2, maximum=3, **settings):
        super().__init__(minimum, maximum, **{"progress_timeout": 10.0, **settings})
        self.beats = {}  # progress by worker, for those whose heart beats
        self.waiting = set()

    def post(self, *events):
        books = (i.Record, i.NewSteps, i.SaveState)
        return [instruction for instruction in super().post(*events) if not isinstance(instruction, books)]

    def pass_time(self, seconds, progress=True, tick=0.1):
        out = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += tick
            for worker_id in list(self.beats):
                waiting = worker_id in self.waiting
                self.beats[worker_id] += progress and not waiting
                self.post(e.FromWorker(worker_id, m.Heartbeat(1, 0, self.beats[worker_id], waiting)))
            out += self.post(e.Tick())
        return out

    def connect(self, *ids):
        for worker_id in ids:
            self.beats.setdefault(worker_id, 0)
            self.post(e.WorkerPlaced(worker_id, "h", 1), e.FromWorker(worker_id, m.Hello("h", 1)))

    def ask(self, *ids):
        return self.post(*(e.FromWorker(worker_id, m.Ask(0, 0, False)) for worker_id in ids))

    def ask_again(self, *ids, broken=False):
        return self.post(*(e.FromWorker(worker_id, m.Ask(1, 5, True, broken)) for worker_id in ids))

    def train(self):
        """Bring the first world up, of as many as the range allows."""
        ids = range(self.settings.workers.maximum)
        self.post(e.Tick())
        self.connect(*ids)
        self.ask(*ids)
        assert self.phase == "running"

    def exit(self, worker_id, cause=e.ExitCause.KILLED, code=-9):
        self.beats.pop(worker_id, None)
        return self.post(e.WorkerExited(worker_id, cause, code, "SIGKILL", "the last lines"))

    def clean_exit(self, *ids):
        return [each for worker_id in ids for each in self.exit(worker_id, e.ExitCause.CLEAN, 0)]


class Yard(Played):
    """Its workers are never silent or stuck; it shows what launchers are told."""

    shows = (i.LaunchWorker, m.Drain, i.KillWorker)

    def __init__(self, maximum=3, minimum=1, **more):
        times = {"start_timeout": START, "stop_grace": GRACE, "progress_timeout": LONG, "heartbeat_timeout": LONG}
        super().__init__(minimum, maximum, **{**times, "join_window": 0.1, **more})

    def wait(self, seconds=0.0):
        """In two steps, as a master that was held up forgives everybody."""
        out = []
        for _ in range(2):
            self.now += seconds / 2
            out += self.post(e.Tick())
        return out

    def connect(self, worker_id, version=0):
        return self.post(e.FromWorker(worker_id, m.Hello("h", 1, version)))

    def ask(self, worker_id, left=0, step=0, broken=False, reason="", **more):
        return self.post(
            e.FromWorker(worker_id, m.Ask(left, step, **{"has_state": left > 0, **more}, broken=broken, reason=reason))
        )

    def come(self, *ids):
        """They connect, and ask for a world."""
        return [order for worker_id in ids for order in self.connect(worker_id) + self.ask(worker_id)]

    def start(self):
        """Launch all there should be, connect them, and put them into a world."""
        ids = launched(self.wait())
        for worker_id in ids:
            self.place(worker_id)
            self.connect(worker_id)
        for worker_id in ids:
            self.ask(worker_id)
        return ids

    @property
    def ids(self):
        return [worker.worker_id for worker in self.job.workers]

    def exit(self, worker_id, cause=e.ExitCause.KILLED, code=-9, node=""):
        return self.post(e.WorkerExited(worker_id, cause, code, "detail", node=node))

    def crash(self, worker_id):
        return self.exit(worker_id, e.ExitCause.CRASHED, 1)

    def leave(self, worker_id):
        return self.post(e.FromWorker(worker_id, m.Draining("SIGTERM"))) + self.exit(worker_id, e.ExitCause.CLEAN, 0)

    def train(self, worker_id, *steps):
        version = self.job.rendezvous.version
        reports = tuple(m.StepReport(n, 0, 0.5, 8, 0.1, 0.05, version, 8 * n, False) for n in steps)
        self.post(e.FromWorker(worker_id, m.Progress(reports, 1000, 1)))

    @property
    def end(self):
        return self.reason if self.phase in ("stopping", "failed") else ""


# ---- a job whose workers act by themselves ----


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
    orders: list = field(default_factory=list)
    away: int = 0  # so many ticks until it connects


class Cluster(Played):
    """It carries out what the job wants, and each worker answers as it should, unless it is frozen or away. Masters may die."""

    def __init__(self, minimum, maximum, **more):
        times = {"heartbeat_timeout": HEARTBEAT_TIMEOUT, "progress_timeout": 6.0, "stop_grace": 5.0}
        super().__init__(minimum, maximum, recovery_timeout=RECOVERY_TIMEOUT, **times, **more)
        self.saved = self.end = None
        self.workers, self.worlds = {}, {}
        self.killed = []

    @property
    def version(self):
        return max(self.worlds, default=0)

    @property
    def members(self):
        return {worker.worker_id for worker in self.job.workers if worker.state == "member"}

    def all(self, kind):
        return only(kind, self.out)

    def post(self, *events):
        for event in events:
            if self.job is None or self.end:
                return
            for instruction in super().post(event):
                self.carry_out(instruction)
            self.saved = self.job.snapshot()

    def carry_out(self, instruction):
        match instruction:
            case i.LaunchWorker(worker_id):
                self.workers[worker_id] = Worker(worker_id)
            case i.KillWorker(worker_id) if worker_id in self.workers:
                self.killed.append(worker_id)
            case i.Tell(ids, World() as world):
                self.worlds.setdefault(world.version, world)
                for worker_id in ids:
                    self.enter(world, worker_id)
            case i.Tell(ids, message):
                for worker_id in ids:
                    self.order(worker_id, message)
            case i.EndJob():
                self.end = instruction

    def train(self, seconds, count=30, samples=64):
        """The members of the present world tell of so many steps, each of so many seconds."""
        world = self.worlds[self.version]
        first = self.job.training.step
        steps = [
            m.StepReport(first + n, 0, 0.5, samples, 0.1, seconds, world.version, samples * n, False)
            for n in range(1, count + 1)
        ]
        self.post(e.FromWorker(world.worker_ids[0], m.Progress(tuple(steps), 0, 0)))

    def order(self, worker_id, message):
        obeyed = isinstance(message, m.Change | m.Broken | m.StopWork | m.Drain)
        if obeyed and worker_id in self.workers and self.workers[worker_id].connected:
            self.workers[worker_id].orders.append(message)

    def enter(self, world, worker_id):
        worker = self.workers.get(worker_id)
        if worker and worker.connected and worker.asked and worker.world < world.version:
            worker.asked, worker.world, worker.has_state = False, world.version, True
            worker.step = max(member.step for member in world.members)
            worker.orders.clear()

    def live(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for worker_id in self.killed[:]:
                self.exit(worker_id)
            for worker in list(self.workers.values()):
                if not worker.frozen:
                    self.act(worker)
            self.post(e.Tick())

    def act(self, worker):
        if self.job is not None and not worker.connected:
            worker.away -= 1
            if worker.away < 0:
                self.connect(worker)
        hangs = self.hangs(worker)
        worker.progress += not hangs
        self.obey(worker, hangs)
        if worker.worker_id in self.workers and worker.connected:
            world = 0 if worker.asked else worker.world
            self.post(e.FromWorker(worker.worker_id, m.Heartbeat(world, worker.step, worker.progress, hangs)))

    def hangs(self, worker):
        """It waits in a collective for one that will never come there."""
        if worker.asked or not worker.world:
            return False
        others = [self.workers.get(member.worker_id) for member in self.worlds[worker.world].members]
        return any(not other or other.frozen or other.world != worker.world for other in others)

    def connect(self, worker):
        """With its session a worker says again what is still true."""
        worker.connected, inside = True, not worker.asked and worker.world
        self.post(e.FromWorker(worker.worker_id, m.Hello("h", 1, worker.world if inside else 0)))
        if worker.asked:
            self.ask(worker, broken=False)

    def obey(self, worker, hangs):
        orders, worker.orders = worker.orders, []
        if any(isinstance(order, m.Drain | m.StopWork) for order in orders):
            self.leave(worker.worker_id)
        elif worker.world == 0 and not worker.asked:
            self.ask(worker, broken=False)
        elif any(order.world_version == worker.world for order in orders) and not worker.asked:
            self.ask(worker, broken=any(isinstance(order, m.Broken) for order in orders))
        elif not worker.asked and not hangs:
            worker.step += 1

    def ask(self, worker, broken):
        worker.asked = True
        if worker.connected:
            self.post(e.FromWorker(worker.worker_id, m.Ask(worker.world, worker.step, worker.has_state, broken)))

    def exit(self, worker_id, cause=e.ExitCause.KILLED):
        self.workers.pop(worker_id, None)
        self.killed = [other for other in self.killed if other != worker_id]
        exited = e.WorkerExited(worker_id, cause, 0 if cause is e.ExitCause.CLEAN else 1)
        if self.job is None:
            self.unreported.append(exited)
        self.post(exited)

    def leave(self, worker_id):
        """As with SIGTERM."""
        self.post(e.FromWorker(worker_id, m.Draining("told to")), e.WorkerDisconnected(worker_id))
        self.exit(worker_id, e.ExitCause.CLEAN)

    def die(self):
        """The master does."""
        self.job, self.unreported = None, []
        for worker in self.workers.values():
            worker.connected = False

    def rise(self, remember=True, forgotten=()):
        """Another master, from what was saved and what there is; nothing may be left of workers that have ended."""
        memory = Snapshot.from_json(Snapshot(self.saved, 0.0).to_json()).job if remember else None
        self.job = Job(self.settings, memory)
        reported = [exited for exited in self.unreported if exited.worker_id not in forgotten]
        there = sorted([*self.workers, *(exited.worker_id for exited in reported)])
        found = (e.FoundWorker(worker_id, "h", 1) for worker_id in there)
        self.post(e.WorkersFound(tuple(found)), *reported)

    def restart(self):
        self.die()
        self.rise()
