"""What a worker tells again when its stream to the master is opened anew."""

import pytest

from elasticdl.common.credentials import Token
from elasticdl.common.environment import MASTER_TIMEOUT, WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.elastic.session.membership import JoinRequest, Session
from elasticdl.elastic.session.reports import KEPT_STEPS, Reports, StepReport
from elasticdl.elastic.session.stream import MasterStream
from elasticdl.proto import elasticdl_pb2 as pb

ENVIRONMENT = WorkerEnvironment("127.0.0.1:1", Token("t"), 3, "job.json")


def step(number, world=1):
    return StepReport(number, 0, 0.5, 8, 0.1, 0.01, world, 8 * number, False, 10**6, 1)


def steps_of(message):
    return [report.step for report in message.progress.steps] if message else []


class Rank0:
    def __init__(self):
        self.sent = []
        self.reports = Reports(lambda message: self.sent.extend(steps_of(message)))
        self.reports.enter(1, speaks=True)

    def add(self, *numbers, world=1):
        for number in numbers:
            self.reports.add(step(number, world))


def test_each_step_is_sent_once_until_the_stream_is_another():
    r = Rank0()
    r.add(1, 2)
    r.reports.flush()
    r.reports.flush()
    r.add(3)
    r.reports.flush()
    assert r.sent == [1, 2, 3]
    r.add(4)
    assert steps_of(r.reports.again()) == [1, 2, 3, 4]
    r.add(5)
    r.reports.flush()
    assert r.sent == [1, 2, 3, 5]


def test_steps_that_are_made_again_in_a_later_world_are_sent_again():
    r = Rank0()
    r.add(1, 2, 3)
    r.reports.flush()
    r.add(2, 3, world=2)
    r.reports.flush()
    assert r.sent == [1, 2, 3, 2, 3]


def test_of_a_long_time_without_a_master_the_last_steps_are_kept():
    r = Rank0()
    r.add(*range(1, 2 * KEPT_STEPS + 1))
    assert steps_of(r.reports.again()) == list(range(KEPT_STEPS + 1, 2 * KEPT_STEPS + 1))


def test_only_rank_0_speaks_and_a_new_one_tells_what_its_predecessor_may_not_have():
    r = Rank0()
    r.reports.enter(1, speaks=False)
    r.add(1, 2)
    r.reports.flush()
    assert r.sent == []
    assert r.reports.again() is None
    r.reports.enter(2, speaks=True)
    r.add(3, world=2)
    r.reports.flush()
    assert r.sent == [1, 2, 3]


def kinds(session):
    return [message.WhichOneof("body") for message in session.greeting()]


def world(version, *ids):
    members = [pb.Member(worker_id=worker_id, host="h", step=4, has_state=True) for worker_id in ids]
    return pb.MasterMessage(world=pb.World(version=version, members=members))


@pytest.fixture
def session(monkeypatch):
    """A session whose stream leads nowhere."""
    monkeypatch.setattr(MasterStream, "send", lambda self, message: None)
    return Session(ENVIRONMENT)


def test_a_greeting_says_again_what_is_still_true(session):
    assert kinds(session) == ["hello"]
    session.take(world(7, 3, 5))
    session.join(JoinRequest(4, has_state=True))
    session.store.put(("scope", "key"), b"value")
    session.report_step(step(5, world=7))
    assert kinds(session) == ["hello", "kv_put", "progress"]
    hello = session.greeting()[0].hello
    assert (hello.world_version, [m.worker_id for m in hello.members], hello.members[0].has_state) == (7, [3, 5], True)
    session.drain("SIGTERM")
    session.say(pb.WorkerMessage(finished=pb.Finished(step=5)))
    assert kinds(session) == ["hello", "kv_put", "progress", "draining", "finished"]
    assert session.has_last_word


def test_between_worlds_a_greeting_asks_and_claims_none(session):
    session.take(world(7, 3, 5))
    session.join(JoinRequest(4, has_state=True))
    session.store.put(("scope", "key"), b"value")
    session.take(pb.MasterMessage(stop_work=pb.StopWork(reason="enough")))
    with pytest.raises(Exception, match="enough"):
        session.join(JoinRequest(5, has_state=True))
    hello, ask = session.greeting()
    assert (hello.hello.world_version, list(hello.hello.members)) == (0, [])
    assert (ask.ask.left_world, ask.ask.step) == (7, 5)


def test_how_long_a_worker_does_without_a_master_is_the_launchers_to_say():
    variables = WorkerEnvironment("h:1", Token("t"), 3, "job.json", master_timeout=600.0).to_env()
    assert WorkerEnvironment.from_env(variables).master_timeout == 600.0
    del variables[MASTER_TIMEOUT]
    assert WorkerEnvironment.from_env(variables).master_timeout == 30.0
    with pytest.raises(UserError, match="must be a number of seconds, not 'long'"):
        WorkerEnvironment.from_env({**variables, MASTER_TIMEOUT: "long"})
