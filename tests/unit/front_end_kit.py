"""What a front end has to keep, whatever its library: jobs of this process and of its threads, and workers that come later, are behind, or are lost.

No state is sent when threads join, and all threads draw from the same random streams. So make their trainers one after the other, from the
same seed, before `JobOfThreads.run`, and let training draw nothing.
"""

from __future__ import annotations

import pickle
import threading

from elastic_kit import Board, SumOfThreads, in_threads
from session_kit import FakeMaster, enter, lose_world, receive

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import World, WorldBroken
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.torch_kit.participant import Outcome, Participant
from elasticdl.elastic.torch_kit.tensors import ElasticContext


class OwnJob:
    """In place of what knows this process's job: one of it alone, as often as one likes."""

    def init_in_place(self, global_batch_size):
        return ElasticContext.connect(BatchPolicy(global_batch_size, None), seed=0, environ={})

    def train_in_place(self, finish):
        self.finish = finish

    def leave(self): ...

    def rank(self):
        return 0


class Lost(Exception):
    """A worker is; see `BreakingBoard`."""


class BreakingBoard(Board):
    """Where a worker is lost, by `lose`, the others' world breaks."""

    def exchange(self, rank, tensors):
        try:
            return super().exchange(rank, tensors)
        except threading.BrokenBarrierError:
            raise WorldBroken("a worker is lost") from None

    def lose(self):
        self.barrier.abort()
        raise Lost


def be_alone(context):
    """The others are lost."""
    core = context.session.core
    lose_world(context)
    context.collective.world = World.of(core.world.version + 1, (context.world.root,), 0)
    enter(context, context.collective.world)


class JobOfThreads:
    """In place of what knows this process's job: each thread is a worker of a world of so many."""

    def __init__(self, workers):
        self.board = BreakingBoard(workers)
        self._own = threading.local()
        self.told = []  # for the journal

    def rank(self):
        return getattr(self._own, "rank", 0)

    def init_in_place(self, global_batch_size):
        rank = self._own.rank
        collective = SumOfThreads(rank, self.board)
        session = FakeMaster(core=WorkerCore(rank)).session
        context = ElasticContext(session, collective, BatchPolicy(global_batch_size, None), seed=0)
        context.check_state, context.warn = "epoch", self.told.append
        session.jobs_place = lambda: (0, 0)

        def join(state):
            context._ask_for_world(state)
            enter(context, collective.world)
            for part in p.SaveScope:
                state.save(part)

        context.join, context.change_world = join, lambda state, why: be_alone(context)
        return context

    def train_in_place(self, finish):
        self._own.finish = finish

    def leave(self): ...

    def run(self, work):
        """``work(rank)`` on each worker, and the end of its script: the error that each has raised, or None; what it returned."""

        def run(rank):
            self._own.rank = rank
            try:
                made = work(rank)
                self._own.finish()
            except (UserError, Lost) as error:
                return error, None
            return None, made

        return tuple(zip(*in_threads(run, range(self.board.size)), strict=True))


def keep_states(monkeypatch, work):
    """What it returns, and the states before each of its batches."""
    states, commit = [], Participant.commit

    def keep_and_commit(self, epoch):
        states.append(pickle.dumps(self.state.state_dict()))
        return commit(self, epoch)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "commit", keep_and_commit)
        return work(), states


def take(participant, state):
    """As when it is sent."""
    receive(participant.state, pickle.loads(state))


def come_later(monkeypatch, state, work):
    """``work`` on a worker that comes where the job has this state."""
    join = Participant.join

    def join_from(self):
        join(self)
        take(self, state)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "join", join_from)
        return work()


def be_behind(monkeypatch, step, state, work):
    """``work`` on a worker that has lost the connection when the gradients of this step had arrived everywhere else. ``state``: after that."""

    def take_theirs(participant, settle):
        take(participant, state)
        participant.open_batches.clear()
        return Outcome.BEHIND

    return _settling(monkeypatch, step, take_theirs, work)


def be_torn(monkeypatch, step, work):
    """``work``, of which this step is torn, on the one worker of a `JobOfThreads`."""
    return _settling(
        monkeypatch, step, lambda participant, settle: settle(participant, WorldBroken("it is torn")), work
    )


def _settling(monkeypatch, step, instead, work):
    made, settle = [], Participant.settle

    def settle_otherwise(self, failure=None, **how):
        if not self.is_reduced and not self.is_catching_up:
            made.append(self.state.step)
            if len(made) == step:
                return instead(self, settle)
        return settle(self, failure, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "settle", settle_otherwise)
        return work()
