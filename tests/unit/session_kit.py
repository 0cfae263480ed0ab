"""What tests of the worker's shells share: a session with a made-up master, and worlds entered by hand."""

from __future__ import annotations

from dataclasses import replace

from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.lifecycle import WorkerState
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.core.world import World
from elasticdl.elastic.link.session import Session


def alone() -> Session:
    """Of a script that no master has started."""
    return Session(WorkerCore(under_master=False))


class FakeMaster:
    """A stream to nowhere: it answers each request to join with the next world, or whatever else the list holds."""

    def __init__(self, *answers, core=None):
        self.answers = list(answers)
        self.sent = []
        self.session = Session(core or WorkerCore(3), lambda session: self)

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, m.JoinRequest) and (answer := self.answer(message)) is not None:
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
        return [step for message in self.of(m.StepReports) for step in message.steps]

    def open(self): ...

    def look(self): ...

    def wait_until_taken(self): ...

    def refuse(self, reason): ...

    def close(self): ...


def enter(context, world):
    """Be in a world, whose collective is connected already, where this worker stands; out of the present one, if any."""
    session = context.session
    if session.core.state is WorkerState.PREPARING:
        session.post_and_take(p.Trigger.READY)
    else:
        context._tell(p.WorldLeft("moved"))
        session.post_and_take(p.Trigger.CLOSED)
    session.post_and_take(p.WorldPublished(replace(world, version=session.core.left_version + 1)))
    session.post_and_take(p.Trigger.CONNECTED)
    context._tell(p.Synced(context.progress))
    context._next.clear()


def lose_world(context):
    """A collective fails: what was saved is gone back to."""
    context._tell(p.CollectiveFailed("a collective failed"))
    context._next.clear()
