"""What tests of the worker's shells share: a session with a made-up master, who listens to a stream, and worlds entered by hand."""

from __future__ import annotations

import queue
from dataclasses import replace
from types import SimpleNamespace

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.training_step import WorkerState
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.training.job import JobContext
from elasticdl.job import messages as m


class JobStub(SimpleNamespace):
    """Of a job what a test has given it."""

    waiting = JobContext.waiting


def alone() -> Session:
    """Of a script that no master has started."""
    return Session(WorkerCore(under_master=False))


class Listening:
    """What a session hears from its stream."""

    has_last_word = False

    def __init__(self):
        self.heard = queue.SimpleQueue()

    def greet(self, unsent):
        return [m.Hello(), *unsent]

    def receive(self, message):
        self.heard.put(message.WhichOneof("body"))

    def lost(self, reason):
        self.heard.put(reason)

    def next(self):
        return self.heard.get(timeout=30.0)


class FakeMaster:
    """A stream to nowhere: it answers each request to join with the next world, or whatever else the list holds."""

    def __init__(self, *answers, core=None):
        self.answers = list(answers)
        self.sent = []
        self.session = Session(core or WorkerCore(3), self)

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, m.Ask) and (answer := self.answer(message)) is not None:
            self.session.post(p.WorldPublished(answer) if isinstance(answer, World) else answer)

    def answer(self, request):
        return self.answers.pop(0) if self.answers else None

    def of(self, kind):
        """What was sent of one kind."""
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def last_word(self):
        return self.of(m.Finished | m.Failed)[-1]

    def notices(self, event):
        """Fields of the notices of one kind, in order."""
        return [dict(notice.fields) for notice in self.of(m.Notice) if notice.event == event]

    @property
    def evaluations(self):
        """What was measured, without how long it took."""
        return [{name: value for name, value in one.items() if name != "seconds"} for one in self.notices("evaluation")]

    @property
    def reports(self):
        self.session.post(p.Trigger.TICK)
        return [step for message in self.of(m.Progress) for step in message.steps]

    def open(self, listener): ...

    def look(self): ...

    def wait_until_taken(self): ...

    def refuse(self, reason): ...

    def close(self): ...


def enter(context, world):
    """Be in a world, whose collective is connected already, where this worker stands; out of the present one, if any.
    Steps may be torn, though it is alone."""
    session, core = context.session, context.session.core
    if core.state is WorkerState.PREPARING:
        context.worlds.begin()
    else:
        leave(context, p.WorldLeft("moved"))
        session.post(p.Trigger.CLOSED)
    session.post(p.WorldPublished(replace(world, version=core.left_version + 1)))
    session.post(p.Trigger.CONNECTED)
    core.position.synced(context.progress, core.world.version, alone=False)
    session.post(p.Trigger.SYNCED)
    assert orders(session) == [p.Command.CONNECT, p.Command.SYNCHRONIZE, p.Command.TRAIN]


def receive(state, sent):
    """As when it is sent."""
    state.receive(sent)
    for part in p.SaveScope:
        state.save(part)


def orders(session):
    """What the training thread is to do, taken from the queue."""
    taken = list(session._orders)
    session._orders.clear()
    return taken


def leave(context, event):
    """The world is left: a torn step is dropped if it broke."""
    context.worlds.tell(event)
    position = context.session.core.position
    for order in orders(context.session):
        position.undo() if order.broken else position.leave()


def lose_world(context):
    """A collective fails: what was saved is gone back to."""
    leave(context, p.CollectiveFailed("a collective failed"))
