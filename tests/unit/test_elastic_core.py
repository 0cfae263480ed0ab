"""The worker's core: what it does when, by lists of events.

Only what the simulator does not find. That no order of events confuses it, that steps are torn and made again, that workers
leave, linger and say again what a new master must know is tested in tests/simulation.
"""

from functools import partial

import pytest

from elasticdl.common.errors import JobFailedError, UnreachableError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy, Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.training_step import Position, Vote, WorkerState
from elasticdl.elastic.core.worker import MAX_FRUITLESS_WORLDS, WorkerCore
from elasticdl.job import messages as m
from tests.simulation.job_invariants import check_worker

S = WorkerState
ME, OTHER = 3, 5
GLOBAL_BATCH = 20
ORDER = SampleOrder(50, BatchPolicy(GLOBAL_BATCH, None))


def world(version, size=2, holders=0):
    """This worker is the first; the first so many hold the state."""
    ids = [ME, *[OTHER] * (size - 1)]
    return World.of(version, tuple(Member(each, "h", 0, place < holders) for place, each in enumerate(ids)), 0)


def plan(step):
    """Of the first epoch: 20, 20 and 10 samples."""
    samples = min(GLOBAL_BATCH, ORDER.samples - GLOBAL_BATCH * (step - 1))
    position = GLOBAL_BATCH * (step - 1) + samples
    return StepPlan(0, step, samples, Progress(0, position, step, position), ())


# What the training thread does, with a worker and without an event.
def bound(order):
    return lambda worker: worker.core.bind(Position(order=order, keeper=worker))


def synced(step=0):
    def come_there(worker):
        worker.core.synced(Progress(step=step))
        worker.do(p.Trigger.SYNCED)

    return come_there


def given(batch, changed=False):
    return lambda worker: worker.core.begin(batch, lambda: changed)


def voted(samples):
    return lambda worker: worker.core.voted(Vote(False, samples, 0.5), worker.now)


def made(worker):
    if pause := worker.core.step_made(0.1, worker.now):
        worker.do(p.Said(pause))


def commit(worker):
    if worker.core.commit():
        worker.do(p.WorldLeft("the members voted to leave this world"))


def batches_over(worker):
    worker.core.position.batch = None


def counted(worker):
    worker.core.count_step(worker.now)


MADE = bound(ORDER)


def entered(version, size=2, step=0, holders=0):
    """From the request to the training function."""
    return [p.WorldPublished(world(version, size, holders=holders)), p.Trigger.CONNECTED, synced(step)]


def step(number):
    batch = plan(number)
    return [given(batch), voted(batch.batch), made]


class CheckedCore:
    """A core that is checked after each event, what it said and told to do, and what was kept of its state."""

    def __init__(self, *events, **options):
        self.core = WorkerCore(ME, **options)
        self.now = 0.0
        self.out = []
        self.kept = []
        self.do(*events)

    def save(self, scope):
        self.kept.append(scope)

    def restore(self):
        self.kept.append("back")

    def do(self, *events):
        """Returns what follows from the last of them."""
        last = []
        for event in events:
            last = self._tell(event) if isinstance(event, p.Event) else event(self)
            check_worker(self.core)
        return last

    def _tell(self, event):
        """As the training thread does, and what it does then."""
        if event is p.Trigger.READY:
            self.core.position.leave()
        out = self.core.step(event, self.now)
        self.out += out
        for each in out:
            if isinstance(each, p.LeaveWorld):
                self.core.position.undo() if each.broken else self.core.position.leave()
        return out

    def sent(self, kind):
        return [each.message for each in self.out if isinstance(each, p.Send) and isinstance(each.message, kind)]


def training(*events, size=2, **options):
    return CheckedCore(MADE, p.Trigger.READY, *entered(1, size), *events, **options)


@pytest.mark.parametrize(("events", "trained"), [((), False), ((counted,), True)])
def test_who_raises_says_whether_it_has_trained(events, trained):
    """Also a script of Horovod's, whose commits count: another worker would do no better."""
    worker = training(*events, p.Said(m.failed("loss is nan", "", users=True)))
    assert [failed.trained for failed in worker.sent(m.Failed)] == [trained]


def test_what_a_script_does_outside_of_its_training_is_no_step_of_the_job():
    worker = training(*step(1), commit, p.WorldLeft("voted"), p.Trigger.CLOSED)
    worker.do(given(plan(2)), made, commit, counted)
    assert worker.core.position.progress == plan(1).after
    assert worker.core.pass_by(1.0) is None


# -- from world to world --


def test_alone_nothing_is_kept_until_that_world_is_left():
    worker = training(size=1)
    worker.kept.clear()
    worker.do(*step(1), commit, *step(2))
    assert worker.kept == []
    worker.do(p.WorldLeft("another comes"))
    assert worker.kept == list(p.SaveScope)
    worker.do(p.Trigger.CLOSED, p.WorldPublished(world(2)), p.CollectiveFailed("no peer"))
    assert (worker.kept[-1], worker.core.position.progress) == ("back", plan(2).after)


def test_a_world_that_broke_before_it_was_entered_is_left_as_all_that_break():
    worker = CheckedCore(MADE, p.Trigger.READY, p.Ordered(m.Broken(1, "a member is gone")))
    assert worker.out[-1] == p.BreakCollective(1, "a member is gone", entered=False)
    assert (worker.do(p.WorldPublished(world(1))), worker.core.world) == ([p.Command.CONNECT], world(1))
    (asked,) = worker.do(p.CollectiveFailed("its store says that it is broken"), p.Trigger.CLOSED)
    assert (asked.message.left_world, asked.message.broken) == (1, True)
    assert (worker.do(p.WorldPublished(world(2))), worker.core.world) == ([p.Command.CONNECT], world(2))


def test_a_world_that_comes_while_an_earlier_one_is_being_connected_is_entered_next():
    """The master could not save for a while: it no longer expects this worker in the earlier one."""
    worker = CheckedCore(MADE, p.Trigger.READY, p.WorldPublished(world(1)))
    assert worker.do(p.WorldPublished(world(2))) == [p.BreakCollective(1, "world 2 follows it", entered=True)]
    worker.do(p.CollectiveFailed("broken off"))
    assert (worker.do(p.Trigger.CLOSED), worker.core.world) == ([p.Command.CONNECT], world(2))
    assert len(worker.sent(m.Ask)) == 1, "it is expected there"
    alone = training(size=1)  # nothing wakes it, so it looks
    alone.do(p.WorldPublished(world(2)))
    assert alone.core.leaving


def test_worlds_that_break_without_a_step_have_an_end():
    worker = CheckedCore(MADE, p.Trigger.READY)
    for version in range(1, 2 * MAX_FRUITLESS_WORLDS - 1):
        middle = step(1) if version == MAX_FRUITLESS_WORLDS - 1 else []  # which begins the count anew
        worker.do(*entered(version), *middle, p.CollectiveFailed("no peer"), p.Trigger.CLOSED)
    *_, failed = worker.do(p.WorldPublished(world(2 * MAX_FRUITLESS_WORLDS - 1)), p.CollectiveFailed("no peer"))
    assert failed == p.Fail(JobFailedError, "20 worlds in a row broke before a step; the last: no peer")
    assert worker.core.state is S.GONE


# -- the cursor and the commit point --


def test_who_is_brought_to_the_others_state_may_turn_out_to_be_in_an_earlier_training():
    """Then it makes the state of the next one, and asks for a world of those who train that."""
    worker = CheckedCore(MADE, p.Trigger.READY, p.WorldPublished(world(1)), p.Trigger.CONNECTED)
    later = SampleOrder(ORDER.samples * 2, ORDER.policy, 0)
    worker.do(bound(later), p.Trigger.READY, *entered(2))
    assert worker.core.position.order == later
    worker.do(MADE)
    assert worker.core.position.order == later, "the members train that one"


def test_a_step_whose_update_was_skipped_counts_as_made_and_the_commit_after_the_last_batch_ends_the_epoch():
    worker = training(given(plan(1)), voted(GLOBAL_BATCH), commit)
    assert worker.kept[-2:] == list(p.SaveScope)
    assert worker.core.position.progress == plan(1).after
    worker.do(*step(2), commit, *step(3), commit)
    assert worker.core.position.progress == plan(3).after
    worker.do(batches_over, commit)
    assert worker.core.position.progress == plan(3).after.next_epoch()


def test_a_setting_changed_after_the_commit_is_saved():
    worker = training(*step(1), commit, size=2)
    for number in (2, 3):
        worker.kept.clear()
        worker.do(given(plan(number), changed=True))
        assert worker.kept == [p.SaveScope.AT_COMMIT]
        worker.do(voted(plan(number).batch), made, commit)


# -- the end --


def test_told_to_leave_after_the_last_step_it_ends_with_the_others_all_the_same():
    worker = training(*step(1), commit, p.Trigger.RETURNED, p.Ordered(m.Drain("scaled down")))
    assert worker.do(p.Trigger.ALL_RETURNED)[-1] == p.Command.COMPLETE
    finished = m.Finished(1, 1, {}, together=True)
    assert worker.do(p.Said(finished)) == [p.Send(finished)]
    assert worker.core.state is S.GONE


def test_each_part_of_a_pause_is_what_it_took_and_the_ordinary_way_to_a_point_is_taken_off():
    """Of a script of Horovod's."""
    worker = training()
    for now in (10, 20, 30):
        assert worker.core.pass_by(now) is None
    joined = p.WorldPublished(world(2, size=3))
    happens = {31: p.WorldLeft("committed"), 33: p.Trigger.CLOSED, 36: joined, 40: p.Trigger.CONNECTED, 45: synced()}
    for now, event in happens.items():
        worker.now = now
        worker.do(event)
    pause = worker.core.pass_by(61)
    assert worker.core.pass_by(71) is None
    parts = {"notice": 1, "drain": 2, "rendezvous": 3, "init": 4, "sync": 5, "first_step": 6}
    told = {"world": 2, "kind": "grow", **parts, "total": 21, "steps_torn": 0}
    assert pause == m.Notice("pause", told)


# -- told to leave --


@pytest.mark.parametrize("event", [p.Ordered(m.StopWork("no need", checkpoint=True)), p.MasterLost("no need")])
def test_one_that_waits_leaves_at_once_and_has_failed_if_it_has_never_heard_a_master(event):
    worker = CheckedCore(MADE, p.Trigger.READY, p.Welcomed(0.5))
    assert worker.do(event) == [p.LeaveJob("no need", checkpoint=True, drained=False)]
    assert worker.core.state is S.GONE
    if isinstance(event, p.MasterLost):
        assert CheckedCore(MADE, p.Trigger.READY).do(event) == [p.Fail(UnreachableError, "no need")]


def test_the_last_of_a_world_in_which_all_leave_waits_for_the_next_and_knows_that_it_is_the_last():
    left = (*step(1), commit, p.Terminated("SIGTERM"), p.WorldLeft("voted"), p.Trigger.CLOSED)
    left_alone = partial(training, *left, linger_seconds=9)
    worker = left_alone()
    assert worker.core.state is S.WAITING
    worker.now = 9.0
    assert worker.do(p.Trigger.TICK)[-1] == p.LeaveJob("SIGTERM", checkpoint=False, drained=True)
    assert worker.core.may_be_last
    relieved = left_alone()
    relieved.do(*entered(2, step=1, holders=1))
    assert not relieved.core.leaving, "the newcomer may be told to leave as well"
    relieved.do(p.Ordered(m.Drain("SIGTERM")))
    assert relieved.core.leaving
    assert not relieved.core.may_be_last


# -- the master --


def test_an_earlier_master_is_refused_and_not_obeyed():
    worker = CheckedCore(MADE, p.Trigger.READY, p.SessionOpened(), p.Welcomed(0.5, 2), p.SessionOpened())
    (refused,) = worker.do(p.Welcomed(0.5, 1))
    assert isinstance(refused, p.RefuseMaster)
    assert worker.do(p.WorldPublished(world(1)), p.Ordered(m.StopWork("old", checkpoint=False))) == []
    worker.do(p.SessionOpened(), p.Welcomed(0.5, 2))
    assert (worker.do(p.WorldPublished(world(1))), worker.core.world) == ([p.Command.CONNECT], world(1))


def test_heartbeats_begin_when_the_master_has_taken_the_session_up():
    worker = CheckedCore(MADE)
    for beats, seconds in ((0, 0.0), (1, 10.0)):
        worker.now = seconds
        worker.do(p.SessionOpened(), p.Trigger.TICK)
        assert len(worker.sent(m.Heartbeat)) == beats
        worker.do(p.Welcomed(0.5, 1), p.Trigger.TICK)
        assert len(worker.sent(m.Heartbeat)) == beats + 1
