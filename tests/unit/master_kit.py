"""A job's surroundings, played: `Cluster` carries out what the job wants and lets each worker answer as it should, unless
it is frozen, stuck or cut off. The master may die between any two things that it does, and another takes its place.
"""

from dataclasses import dataclass, field

from elasticdl.job.event_catalogue import KINDS
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.snapshot import Snapshot
from elasticdl.master.state.values import Settings
from tests.simulation.job_invariants import check_job

TICK = 0.5
HEARTBEAT_TIMEOUT = 4.0
PROGRESS_TIMEOUT = 6.0
RECOVERY_TIMEOUT = 8.0
NEVER = 10**9


def step(job, event, now):
    """One step, after which all invariants hold."""
    instructions = job.step(event, now)
    check_job(job)
    for instruction in instructions:
        if isinstance(instruction, i.Record):
            assert set(instruction.fields) <= set(KINDS[instruction.event].fields), f"not declared: {instruction}"
    return instructions


@dataclass
class Worker:
    worker_id: int
    connected: bool = False
    asked: bool = False
    world: int = 0
    members: tuple = ()
    step: int = 0
    has_state: bool = False
    progress: int = 0
    frozen: bool = False
    stuck: bool = False
    finished: bool = False
    orders: list = field(default_factory=list)
    away: int = 0  # so many ticks until it connects
    leaving: int | None = None  # so many ticks until it ends, since it was told to leave


class Cluster:
    def __init__(self, minimum, maximum, last_step=NEVER, **more):
        self.limits = WorkerRange(minimum=minimum, maximum=maximum)
        times = {"heartbeat_timeout": HEARTBEAT_TIMEOUT, "progress_timeout": PROGRESS_TIMEOUT, "stop_grace": 5.0}
        self.settings = Settings(self.limits, recovery_timeout=RECOVERY_TIMEOUT, **times, **more)
        self.job = Job(self.settings)
        self.saved = None
        self.fuse = None  # so many more instructions are carried out before the master dies
        self.now = 0.0
        self.last_step = last_step
        self.workers = {}
        self.worlds = {}
        self.launched = set()
        self.killed = []
        self.doomed = set()  # who is killed with the same step
        self.unreported = []  # ends that no master has heard of
        self.said = []
        self.story = []  # every instruction that was carried out
        self.end = None

    @property
    def version(self):
        return max(self.worlds, default=0)

    def post(self, event):
        if self.job is None or self.end:
            return
        self.said.append(event)
        instructions = step(self.job, event, self.now)
        before, self.saved = self.saved, self.job.snapshot()
        if before and before != self.saved:
            assert i.SaveState() in instructions
        self.doomed = {instruction.worker_id for instruction in instructions if isinstance(instruction, i.KillWorker)}
        for instruction in instructions:
            if self.fuse == 0:
                self.die()
            if self.job is None:
                return
            self.fuse = self.fuse and self.fuse - 1
            self.story.append(instruction)
            self.carry_out(instruction)

    def carry_out(self, instruction):
        match instruction:
            case i.LaunchWorker(worker_id):
                assert worker_id not in self.launched
                self.launched.add(worker_id)
                self.workers[worker_id] = Worker(worker_id)
            case i.KillWorker(worker_id) if worker_id in self.workers:
                self.killed.append(worker_id)
            case i.PublishWorld(world, ids):
                self.check(world, ids)
            case i.AnnounceChange(ids) | i.BreakWorld(ids) | i.StopWorkers(ids):
                if isinstance(instruction, i.BreakWorld):
                    assert not self.is_intact(instruction.world_version)
                for worker_id in ids:
                    self.order(worker_id, instruction)
            case i.DrainWorker(worker_id):
                self.order(worker_id, instruction)
            case i.EndJob():
                self.end = instruction

    def order(self, worker_id, instruction):
        if worker_id in self.workers and self.workers[worker_id].connected:
            self.workers[worker_id].orders.append(instruction)

    def check(self, world, ids):
        if world.version in self.worlds:
            assert self.worlds[world.version].members == world.members
            assert len(ids) == 1
        else:
            assert world.version > self.version
            self.check_new(world)
            self.worlds[world.version] = world
        for worker_id in ids:
            self.enter(world, worker_id)

    def check_new(self, world):
        ids = world.worker_ids
        assert len(set(ids)) == len(ids)
        finished = any(isinstance(event, e.WorkerFinished) for event in self.said)  # then survivors go on, however few
        assert (1 if finished else self.limits.minimum) <= len(ids) <= self.limits.maximum
        ranks = [(not m.has_state, -m.step if m.has_state else 0) for m in world.members]
        assert ranks == sorted(ranks)
        if not any(isinstance(instruction, i.AdoptWorld) and instruction.world == world for instruction in self.story):
            members = [self.workers[worker_id] for worker_id in ids]  # fails for one that is gone
            assert all(worker.asked and worker.connected for worker in members)
            assert not set(ids).intersection(self.killed)

    def enter(self, world, worker_id):
        worker = self.workers.get(worker_id)
        if worker and worker.connected and worker.asked and worker.world < world.version:
            worker.asked, worker.world, worker.has_state = False, world.version, True
            worker.place = world.worker_ids.index(worker_id), len(world.members)
            worker.step = max(member.step for member in world.members)
            worker.orders.clear()

    def is_intact(self, version):
        """Every member of this world is alive and in it. One that was only remembered may never have been published."""
        if version not in self.worlds:
            return False
        members = [self.workers.get(worker_id) for worker_id in self.worlds[version].worker_ids]
        return all(
            w
            and w.world == version
            and w.worker_id not in (*self.killed, *self.doomed)
            and not (w.asked or w.frozen or w.stuck or w.finished)
            for w in members
        )

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
        if self.job is not None and not worker.connected:
            worker.away -= 1
            if worker.away < 0:
                self.connect(worker)
        hangs = self.hangs(worker)
        if not worker.stuck:
            worker.progress += not hangs
            self.obey(worker)
        if worker.worker_id in self.workers and worker.connected:
            world = 0 if worker.asked else worker.world
            self.post(e.HeartbeatReceived(worker.worker_id, world, worker.step, worker.progress, hangs))

    def hangs(self, worker):
        """It waits in a collective for one that will never come there."""
        if worker.asked or worker.finished or not worker.world:
            return False
        others = [self.workers.get(member.worker_id) for member in self.worlds[worker.world].members]
        return any(not other or other.frozen or other.stuck or other.world != worker.world for other in others)

    def connect(self, worker):
        """With its session a worker says again what is still true."""
        worker.connected, inside = True, not worker.asked and worker.world
        place = worker.place if inside else (0, 0)
        self.post(e.WorkerConnected(worker.worker_id, "h", 1, worker.world if inside else 0, worker.step, *place))
        if worker.asked:
            self.ask(worker, broken=False)
        if worker.leaving is not None:
            self.post(e.WorkerDraining(worker.worker_id, "SIGTERM"))
        if worker.finished:
            self.post(e.WorkerFinished(worker.worker_id, worker.step, 1, {}))

    def obey(self, worker):
        orders, worker.orders = worker.orders, []
        if worker.leaving is not None:
            self.go(worker)
        elif any(isinstance(order, i.DrainWorker | i.StopWorkers) for order in orders):
            self.leave(worker.worker_id)
        elif worker.finished:
            if worker.connected:  # it waits until its last word was taken
                self.exit(worker.worker_id, e.ExitCause.CLEAN)
        elif worker.world == 0 and not worker.asked:
            self.ask(worker, broken=False)
        elif any(order.world_version == worker.world for order in orders) and not worker.asked:
            self.ask(worker, broken=any(isinstance(order, i.BreakWorld) for order in orders))
        elif not worker.asked and not self.hangs(worker):
            self.train(worker)

    def is_done(self, worker):
        return worker.step >= self.last_step

    def train(self, worker):
        worker.step += 1
        if self.is_done(worker):
            worker.finished = True
            if worker.connected:
                self.post(e.WorkerFinished(worker.worker_id, worker.step, 1, {}))

    def ask(self, worker, broken):
        worker.asked = True
        if worker.connected:
            self.post(e.JoinRequested(worker.worker_id, worker.world, worker.step, worker.has_state, broken))

    # ---- what befalls them ----

    def exit(self, worker_id, cause):
        self.workers.pop(worker_id, None)
        self.killed = [other for other in self.killed if other != worker_id]
        exited = e.WorkerExited(worker_id, cause, 0 if cause is e.ExitCause.CLEAN else 1)
        if self.job is None:
            self.unreported.append(exited)
        self.post(exited)

    def leave(self, worker_id):
        """As with SIGTERM: after its step, and if that was the last, with its last word."""
        worker = self.workers.get(worker_id)
        self.post(e.WorkerDraining(worker_id, "told to"))
        if worker and worker.connected and worker.world and not worker.asked and self.is_done(worker):
            self.post(e.WorkerFinished(worker_id, worker.step, 1, {}))
        self.post(e.WorkerDisconnected(worker_id))
        self.exit(worker_id, e.ExitCause.CLEAN)

    def go(self, worker):
        """It was told to leave, and has its export to end."""
        worker.leaving -= 1
        if worker.leaving <= 0 and worker.connected:
            if worker.finished:
                self.post(e.WorkerFinished(worker.worker_id, worker.step, 1, {}))
            self.post(e.WorkerDisconnected(worker.worker_id))
            self.exit(worker.worker_id, e.ExitCause.CLEAN)

    # ---- what befalls the master ----

    def die(self):
        self.job, self.fuse = None, None
        for worker in self.workers.values():
            worker.connected = False

    def rise(self, remember=True, doubtful=()):
        """Another master, from what was saved and what there is; some ended workers may not even be found."""
        memory = None
        if remember and self.saved:
            memory = Snapshot.from_json(Snapshot(self.saved, 0.0).to_json()).job
        self.job = Job(self.settings, memory)
        ended, self.unreported = self.unreported, []
        reported = [exited for exited in ended if exited.worker_id % 2 or exited.cause is e.ExitCause.CLEAN]
        there = sorted([*self.workers, *(exited.worker_id for exited in reported)])
        found = (e.FoundWorker(worker_id, "h", 1, doubtful=worker_id in doubtful) for worker_id in there)
        self.post(e.WorkersFound(tuple(found)))
        for exited in reported:
            if self.job is None:  # it has died again
                self.unreported.append(exited)
            self.post(exited)

    def restart(self):
        self.die()
        self.rise()

    # ---- fates, drawn at random ----

    def befall(self, fate, number):
        ids = sorted(self.workers)
        worker = self.workers[ids[number % len(ids)]] if ids else None
        if fate == "wait":
            self.live(number * TICK)
        elif fate == "repeat" and self.said:
            self.repeat(self.said[-1 - number % len(self.said)])
        elif fate == "scale" and self.job:
            self.limits = WorkerRange(minimum=1 + number % 2, maximum=2 + number % 4)
            self.post(e.ScaleRequested(self.limits))
        elif fate == "finish":
            steps = [other.step for other in self.workers.values() if other.world and not other.asked]
            self.last_step = min(self.last_step, max(steps, default=0) + number // 4)
        elif fate == "die":
            self.fuse = number  # or in between
        elif fate == "rise":
            self.die()
            self.rise()
        elif worker is not None:
            self.strike(fate, worker, number)

    def strike(self, fate, worker, number):
        match fate:
            case "kill":
                self.exit(worker.worker_id, e.ExitCause.KILLED)
            case "vanish":  # its connection breaks before its end is known
                self.cut(worker)
                self.exit(worker.worker_id, e.ExitCause.KILLED)
            case "term" if not worker.stuck and not worker.frozen:
                inside = worker.connected and worker.world and not worker.asked
                worker.leaving, worker.finished = number, bool(worker.finished or (inside and self.is_done(worker)))
                if worker.connected:
                    self.post(e.WorkerDraining(worker.worker_id, "SIGTERM"))
            case "leave":
                self.leave(worker.worker_id)
            case "freeze" if (
                worker.connected and not worker.finished
            ):  # one that hangs at its start has crashed, which may end the job
                worker.frozen = True
            case "stick" if (worker.asked or worker.world) and not worker.finished:
                worker.stuck = True
            case "cut":
                self.cut(worker)
            case "away":
                self.cut(worker)
                worker.away = number
            case "break" if worker.world and not worker.asked and worker.connected:
                self.ask(worker, broken=True)

    def cut(self, worker):
        worker.connected = False
        self.post(e.WorkerDisconnected(worker.worker_id))

    def repeat(self, event):
        """The same event again, late. The lives and deaths of processes are repeated as they are."""
        if isinstance(event, e.WorkerConnected | e.WorkerDisconnected | e.JoinRequested):
            worker = self.workers.get(event.worker_id)
            if worker is None or isinstance(event, e.JoinRequested):
                self.post(event)
        elif not isinstance(event, e.ScaleRequested):
            self.post(event)
