"""A job in the threads of one process: whoever asks for a world is in the next one, and what its members sum is summed between threads.

Worlds, the state that is sent, votes, breaks and the end are the real ones; made up are the master, which decides nothing but who is in
the next world, and the wire. What happens is told before: ``Job(2, {(1, 3): "lost"})`` loses worker 1 in step 3. Such an event comes
when the worker begins that step, or is about to sum its gradients:

- ``lost``: the worker raises `Lost`, and is gone.
- ``torn``: the sum fails, and nobody is lost.
- ``behind``: of this step's sums it has given its part, and they have arrived everywhere else; here the world breaks.
- ``drained``: it alone is told to leave.
- ``stopped``: all are told to leave, and to keep the state.
- ``joined``: worker number ``workers`` comes, and is told where the job stands.
- ``moved``: all go to another world after the step.
- a `StopWork`: it alone is told so.

One worker at a time is at work, with random streams of its own, until it waits for others. Make models before `Job.run`, one after the other.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading

from elastic_kit import Board, SumOfThreads, in_threads
from session_kit import FakeMaster, receive

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.torch_kit.tensors import ElasticContext, RandomStreams, TorchTensors
from elasticdl.elastic.training.kept_state import KeptState
from elasticdl.job import messages as m


class Lost(Exception):
    """A worker is; see `Job`."""


class Turns:
    """Who has the turn is at work, and draws from streams that go on where it has left them."""

    def __init__(self, streams):
        self._streams, self._turn, self._own = streams, threading.Lock(), threading.local()
        self._first = streams.capture()

    @contextlib.contextmanager
    def taken(self):
        with self._turn:
            self._streams.restore(getattr(self._own, "kept", self._first))
            try:
                yield
            finally:
                self._own.kept = self._streams.capture()

    @contextlib.contextmanager
    def others(self):
        """Within, they may go on."""
        self._own.kept = self._streams.capture()
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            self._streams.restore(self._own.kept)


class BreakingBoard(Board):
    """That of one world, which can break."""

    turns = None

    def exchange(self, *given):
        if self.size == 1:
            return super().exchange(*given)
        try:
            with self.turns.others():
                return super().exchange(*given)
        except threading.BrokenBarrierError:
            raise WorldBroken("a worker is lost") from None


class Wire(SumOfThreads):
    """Of one worker; its boards are those of the job's worlds."""

    def __init__(self, job):
        self.job, self.is_cut = job, False
        super().__init__(0, BreakingBoard(1), job.tensors())
        self._has_compared = True  # its engine

    def start(self, world):
        self.world, self.board = world, self.job.boards.get(world.version, self.board)

    def break_world(self, version):
        self.job.boards[version].barrier.abort()

    def barrier(self, name):
        self.job.may_break(name)
        super().barrier(name)

    def broadcast_array(self, array, name):
        self.job.may_break(name)
        return super().broadcast_array(array, name)

    def gather(self, array, name):
        self.job.may_break(name)
        return super().gather(array, name)

    def sum_(self, tensors, name):
        summed = super().sum_(tensors, name)
        if self.is_cut and tensors and name in self.job.last_of_step:
            self.is_cut = False
            raise WorldBroken("the connection is lost")
        return summed


class Line(FakeMaster):
    """From one worker to the job's master."""

    def __init__(self, job, worker, core):
        self.job, self.worker = job, worker
        super().__init__(core=core)
        order = self.session.order
        self.session.order = lambda: self.wait(order)
        # A worker waits for its master's first word.
        self.session.jobs_place, self.session.jobs_facts = lambda: job.place, bytes

    def wait(self, order):
        with self.job.turns.others():
            return order()

    def send(self, message):
        super().send(message)
        self.job.heard.put((self.worker, message))


class Job:
    """``events``: by worker and step. ``finds``: the state of a job that worker 0 comes to, as of `states`. ``kept``: the folder for states that are
    kept. ``place``: where workers are told that the job stands. ``under_master``: else it is a script that runs by itself."""

    context_kind, tensors, streams = ElasticContext, TorchTensors, RandomStreams
    last_of_step = ("",)  # sums of these names are a step's last word
    keeps_states = True

    def __init__(self, workers=1, events=(), *, finds=None, kept=None, place=(0, 0), under_master=True):
        self.workers, self.events, self.finds, self.kept, self.place = workers, dict(events), finds, kept, place
        self.under_master = under_master
        self.states = {}  # of worker 0, by its steps: as others would be sent it
        self.warnings, self.lines, self.contexts = [], {}, {}
        self.heard, self.living, self.asking = queue.Queue(), set(range(workers)), {}
        self.boards = {}  # by the worlds' versions
        self.breaks = {}  # by a name: which of worker 0's barriers, broadcasts and gathers of that name fails
        self._own, self._joins, self._version = threading.local(), threading.Event(), 0

    @property
    def comers(self):
        """How many come later."""
        return sum(what == "joined" for what in self.events.values())

    # -- in place of what knows a process's job --

    has_begun = False

    def rank(self):
        """The worker's number, with which it began."""
        return getattr(self._own, "worker", 0)

    def init_in_place(self, global_batch_size, most=None):
        return self.join(BatchPolicy(global_batch_size, None, most))

    def join(self, policy, seed=0):
        worker = self.rank()
        core = WorkerCore(worker, under_master=self.under_master)
        wire, line = Wire(self), Line(self, worker, core)
        context = self.context_kind(line.session, wire, policy, seed=seed)
        line.session.break_collective = wire.break_world
        context.check_state, context.warn = "epoch", self.warnings.append
        if self.kept is not None:
            context.kept = KeptState(str(self.kept))
        self.lines[worker], self.contexts[worker] = line, context
        self._watch(worker, context)
        return context

    def train_in_place(self, finish, about_failure=str):
        self._own.finish = finish

    def leave(self):
        self._own.finish = lambda: None

    def come(self, worker, step):
        """What is to happen to it when it begins this step."""
        context = self.contexts[worker]
        match self.events.pop((worker, step), None):
            case "lost":
                self.lose()
            case "torn":
                raise WorldBroken("a sum has failed")
            case "behind":
                context.collective.is_cut = True
            case "drained":
                context.session.post(p.Ordered(m.Drain("told to")))
            case "stopped":
                for each in self.lines.values():
                    each.session.post(p.Ordered(m.StopWork("told to", checkpoint=True)))
            case "moved":
                context.session.post(p.Ordered(m.Change(context.world.version, "moved")))
            case m.StopWork() as told:
                context.session.post(p.Ordered(told))
            case "joined":
                at, batch = context.progress, context.policy.batch_size(1)
                self.place = at.epoch, at.position // batch
                self.living.add(self.workers)
                context.session.post(p.Ordered(m.Change(context.world.version, "another comes")))
                self._joins.set()

    def may_break(self, name):
        if self.rank() == 0 and name in self.breaks:
            self.breaks[name] -= 1
            if not self.breaks[name]:
                raise WorldBroken(f"{name} has failed")

    def lose(self):
        """The worker that calls it."""
        context = self.contexts[self.rank()]
        self.heard.put((self.rank(), Lost()))
        context.collective.break_world(context.world.version)
        raise Lost

    # -- a test --

    def run(self, work):
        """``work(worker)`` on each worker, and the end of its script: what each has raised, or None; what it returned."""
        self.turns = Turns(self.streams)
        master = threading.Thread(target=self._serve, daemon=True)
        master.start()

        def run(worker):
            self._own.worker, self._own.finish = worker, lambda: None
            if worker >= self.workers:
                assert self._joins.wait(30), "it was to come"
            made = error = None
            try:
                with self.turns.taken():
                    made = work(worker)
                    self._own.finish()
            except (UserError, Lost, SystemExit) as raised:
                error = raised
            self.heard.put((worker, Lost()))
            return error, made

        said, made = zip(*in_threads(run, range(self.workers + self.comers)), strict=True)
        self.heard.put(None)
        assert not self.events, "all has happened"
        return said, made

    # -- details --

    def _watch(self, worker, context):
        begin, commit, ask, take_over = context.begin, context.commit, context._ask_for_world, context.take_over
        states = []

        def begin_step(plan, *more):
            self.come(worker, plan.step)
            return begin(plan, *more)

        def keep_and_commit():
            if worker == 0 and self.keeps_states:
                self.states[states[-1].step] = pickle.dumps(states[-1].sent())
            return commit()

        def find(state):
            take_over(state)
            if self.finds is not None:
                receive(state, pickle.loads(self.finds))

        context.begin, context.commit, context.take_over = begin_step, keep_and_commit, find
        context._ask_for_world = lambda state: (states.append(state), ask(state))

    def _serve(self):
        """As the master: all that live and are done with their last world are in the next."""
        for worker, message in iter(self.heard.get, None):
            match message:
                case m.Ask():
                    self.asking[worker] = message
                case m.Draining(lingers=False) | Lost():
                    self.living.discard(worker)
                    self.asking.pop(worker, None)
            if self.living and self.asking.keys() >= self.living:
                self._publish()

    def _publish(self):
        self._version += 1
        order = sorted(self.asking, key=lambda worker: (-self.asking[worker].step, worker))
        members = tuple(
            Member(worker, "h", ask.step, ask.has_state, epoch=ask.epoch, synced_in=ask.synced_in)
            for worker in order
            for ask in [self.asking.pop(worker)]
        )
        self.boards[self._version] = board = BreakingBoard(len(members))
        board.turns = self.turns
        for rank, worker in enumerate(order):
            world = World.of(self._version, members, rank)
            self.lines[worker].session.post(p.WorldPublished(world))
