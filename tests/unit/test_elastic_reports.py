"""What a worker tells its master unasked, of pauses too, and again when its stream is opened anew."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_kit import FakeMaster

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.reporting import KEPT_STEPS, Activity, PauseClock, Reporting
from elasticdl.elastic.core.training_step import Position, Vote
from elasticdl.job import messages as m

TICK = p.Trigger.TICK


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


# -- pauses --


def paused(steps, *left, after, grew=False, resumed=None):
    """``steps``: when they were done. ``left``: when the world was, and whether it broke. ``resumed``: after an evaluation."""
    clock = PauseClock()
    assert [clock.step_done(at, world_version=1, grew=False) for at in steps] == [None] * len(steps)
    for start, broken in left:
        clock.left(start, broken=broken, torn=broken)
        for stage, seconds in {"stopped": 0.01, "joined": 0.03, "started": 0.06, "synced": 0.10}.items():
            clock.mark(stage, start + seconds)
    if resumed:
        clock.resume(resumed)
    return clock.step_done(after, world_version=2, grew=grew)


@pytest.mark.parametrize(
    ("steps", "left", "after", "more", "kind", "total"),
    [
        # Steps that are shorter with more workers make no pause negative.
        ([1.0, 3.0, 5.0], [(5.0, False)], 6.1, {"grew": True}, "grow", 0.1),
        # A second failure on the way belongs to the same pause.
        ([1.0, 1.1], [(1.1, False), (1.5, True)], 1.7, {}, "failure", 0.6 - 0.1),
        ([1.0, 1.1], [(1.1, False)], 5.15, {"resumed": 5.0}, "shrink", 0.15),
    ],
)
def test_a_pause_is_what_a_change_costs_beyond_a_step(steps, left, after, more, kind, total):
    pause = paused(steps, *left, after=after, **more)
    assert (pause.fields["kind"], pause.fields["total"]) == (kind, pytest.approx(total))
    assert pause.fields["first_step"] >= 0
    assert pause.fields["steps_torn"] == (kind == "failure")


def test_a_pause_has_nothing_of_the_one_before():
    clock, told = PauseClock(), []
    clock.step_done(1.0, world_version=1, grew=False)
    for at, broken in ((1.0, True), (3.0, False)):
        clock.left(at, broken=broken, torn=broken)
        for stage in ("stopped", "joined", "started", "synced"):
            clock.mark(stage, at)
        told.append(clock.step_done(at + 1.0, world_version=2, grew=False).fields)
    assert [(each["kind"], each["steps_torn"]) for each in told] == [("failure", 1), ("shrink", 0)]


# -- over a session --


@pytest.fixture
def session():
    """A session that trains in world 7, if it is asked to."""
    session = FakeMaster(world(7)).session
    session.core.bind(Position(Progress(step=4), has_state=True))
    return session


def train(session):
    session.post(p.Trigger.READY)
    session.post(p.Trigger.CONNECTED)
    session.core.synced(Progress(step=4))
    session.post(p.Trigger.SYNCED)
    session.store.put(("scope", "key"), b"value")


def kinds(session, *kept):
    return [type(message) for message in session.greet(kept)]


def test_a_greeting_says_again_what_is_still_true(session):
    assert kinds(session) == [m.Hello]
    train(session)
    session.core.voted(Vote(False, 8, 0.5), 1.0)
    session.core.step_made(0.1, 1.0)
    assert kinds(session) == [m.Hello, m.KvPut, m.Progress]
    assert session.greet(())[0] == m.Hello(world_version=7)
    session.post(p.Ordered(m.Drain("SIGTERM")))
    session.say(m.Finished(5, 1, {}, together=True))
    assert kinds(session, m.Notice("warning", {})) == [m.Hello, m.Progress, m.Draining, m.Notice, m.Finished]
    assert session.has_last_word


def test_a_signal_in_the_midst_of_a_step_waits_for_its_turn(session, monkeypatch):
    real_step, seen = session.core.step, []

    def step(event, now):
        seen.append(event)
        if event is TICK:
            session.post(p.Terminated("SIGTERM"))  # as a handler does, in the same thread
            assert seen == [event]
        return real_step(event, now)

    monkeypatch.setattr(session.core, "step", step)
    session.post(TICK)
    assert seen == [TICK, p.Terminated("SIGTERM")]
    assert session.core.leaving


def test_what_is_to_be_done_for_a_broken_world_is_done_without_the_lock(session):
    """What wakes who waits in it may wait for a thread that posts."""
    train(session)
    seen = []

    def break_collective(version):
        other = threading.Thread(target=session.post, args=(TICK,), daemon=True)
        other.start()
        other.join(30.0)
        seen.append((version, other.is_alive()))

    session.break_collective = break_collective
    for version in (6, 7):
        session.post(p.Ordered(m.Broken(version, "a member is gone")))
    assert seen == [(7, False)]


def test_an_unexpected_error_of_the_heartbeat_ends_no_session_without_a_word(session, monkeypatch):
    real_step = session.core.step
    monkeypatch.setattr(session.core, "step", lambda event, now: real_step(event, now if event is not TICK else 1 / 0))
    session._tick()
    assert session.core.lost == "this worker's heartbeat has failed: ZeroDivisionError: division by zero"
