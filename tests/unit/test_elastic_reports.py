"""What a worker tells its master unasked, and again when its stream is opened anew."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_kit import FakeMaster

from elasticdl.common.credentials import MASTER_TIMEOUT, Token, WorkerEnvironment
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.reporting import KEPT_STEPS, Activity, Reporting
from elasticdl.elastic.core.training_step import Position, Vote
from elasticdl.elastic.link.store import Refusal
from elasticdl.job import messages as m

PATIENCE = 30.0


def world(version, rank=0):
    members = [Member(3, "h", 4, True), Member(5, "h", 4, True)]
    return World.of(version, tuple(members if rank == 0 else members[::-1]), rank)


def test_who_has_returned_from_its_training_waits_and_says_so():
    reporting, said = Reporting(), []
    reporting.interval = 2.0
    for now, activity in enumerate((Activity.WAIT, Activity.END, Activity.UPDATE)):
        reporting.advance(activity, 10.0 * now)
        said += reporting.tick(1, 7, 10.0 * now)
    assert [(beat.waiting, beat.ending) for beat in said] == [(True, False), (True, True), (False, False)]


def count(reporting, step):
    reporting.count(Progress(step=step), 0.5, 8, 0.1, 0.0, ends_epoch=False)


def test_steps_that_nobody_takes_are_not_kept_for_ever():
    """As of a script that runs without a master."""
    reporting = Reporting()
    reporting.enter(world(1))
    for step in range(KEPT_STEPS + 10):
        count(reporting, step)
    steps = [report.step for message in reporting.flush() for report in message.steps]
    assert steps == list(range(10, KEPT_STEPS + 10))


@given(st.lists(st.one_of(st.integers(1, 3), st.sampled_from(["flush", "another stream", "rank 0", "rank 1"]))))
def test_over_each_stream_rank_0_tells_every_step_once_and_nobody_else_tells_any(story):
    """Also those that a predecessor may not have told; the last step may be made again in the next world."""
    reporting, made, told = Reporting(), [], []
    step = version = rank = 0
    for what in ["rank 0", *story, "flush"]:
        if isinstance(what, int):
            for _ in range(what):
                step += 1
                count(reporting, step)
                made.append((version, step))
        elif what.startswith("rank"):
            version, rank, step = version + 1, int(what[-1]), max(0, step - 1)
            reporting.enter(world(version, rank))
        else:
            told = told if what == "flush" else []
            sent = reporting.flush() if what == "flush" else reporting.again()
            told += [(report.world_version, report.step) for message in sent for report in message.steps]
            assert sent == [] if rank else told == made


def kinds(session):
    return [type(message).__name__ for message in session.greet(())]


@pytest.fixture
def session():
    """A session that trains in world 7, if it is asked to."""
    master = FakeMaster(world(7))
    master.session.core.bind(Position(Progress(step=4), has_state=True))
    return master.session


def train(session):
    session.post(p.Trigger.READY)
    session.post(p.Trigger.CONNECTED)
    session.core.synced(Progress(step=4))
    session.post(p.Trigger.SYNCED)


def test_a_greeting_says_again_what_is_still_true(session):
    assert kinds(session) == ["Hello"]
    train(session)
    session.store.put(("scope", "key"), b"value")
    session.core.voted(Vote(False, 8, 0.5), 1.0)
    session.core.step_made(0.1, 1.0)
    assert kinds(session) == ["Hello", "KvPut", "Progress"]
    hello = session.greet(())[0]
    assert hello == m.Hello(world_version=7)
    session.post(p.Ordered(m.Drain("SIGTERM")))
    session.say(m.Finished(5, 1, {}, together=True))
    kept = m.Notice("warning", {})
    greeting = session.greet([kept])
    assert [type(each).__name__ for each in greeting] == ["Hello", "Progress", "Draining", "Notice", "Finished"]
    assert session.has_last_word


def test_between_worlds_a_greeting_asks_and_claims_none(session):
    train(session)
    session.store.put(("scope", "key"), b"value")
    session.post(p.WorldLeft("enough"))
    session.post(p.Trigger.CLOSED)
    hello, ask = session.greet(())
    assert hello.world_version == 0
    assert (ask.left_world, ask.step, ask.has_state) == (7, 4, True)


def test_a_signal_in_the_midst_of_a_step_waits_for_its_turn(session, monkeypatch):
    real_step, seen = session.core.step, []

    def step(event, now):
        seen.append(event)
        if event is p.Trigger.TICK:
            session.post(p.Terminated("SIGTERM"))  # as a handler does, in the same thread
            assert seen == [event]
        return real_step(event, now)

    monkeypatch.setattr(session.core, "step", step)
    session.post(p.Trigger.TICK)
    assert seen == [p.Trigger.TICK, p.Terminated("SIGTERM")]
    assert session.core.leaving


def test_what_is_to_be_done_for_a_broken_world_is_done_without_the_lock(session):
    train(session)
    free = []

    def look():
        free.append(session._changed.acquire(blocking=False))
        session._changed.release()

    def break_collective(version):
        other = threading.Thread(target=look)
        other.start()
        other.join(PATIENCE)

    session.break_collective = break_collective
    session.post(p.Ordered(m.Broken(6, "not ours")))
    assert free == []
    session.post(p.Ordered(m.Broken(7, "a member is gone")))
    assert free == [True]
    with pytest.raises(Refusal):
        session.store.get(("scope", "missing"), timeout=0)


def test_an_unexpected_error_of_the_heartbeat_ends_no_session_without_a_word(session, monkeypatch):
    real_step = session.core.step

    def step(event, now):
        if event is p.Trigger.TICK:
            raise ZeroDivisionError("of the clock")
        return real_step(event, now)

    session.answers = []
    session.post(p.Trigger.READY)
    monkeypatch.setattr(session.core, "step", step)
    session._tick()
    assert session.core.lost == "this worker's heartbeat has failed: ZeroDivisionError: of the clock"


def test_how_long_a_worker_does_without_a_master_is_the_launchers_to_say():
    variables = WorkerEnvironment("h:1", Token("t"), 3, "job.json", master_timeout=600.0).to_env()
    assert WorkerEnvironment.from_env(variables).master_timeout == 600.0
    del variables[MASTER_TIMEOUT]
    assert WorkerEnvironment.from_env(variables).master_timeout == 30.0
