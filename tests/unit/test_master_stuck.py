"""Who is taken to be stuck, when that is said, and who is given up for it."""

import pytest
from master_kit import Run, only

from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.rule import (
    GIVE_UP,
    GIVE_UP_MOVING,
    NAME_FLOOR,
    UNLEARNT_NAME,
    ProgressLimits,
)
from elasticdl.master.core.watching import ANSWER_SECONDS, LOOK_AGAIN, TIME_TO_DUMP
from elasticdl.master.core.worker_record import Pulse

TICK = 0.1
# ---- limits ----


def step_in(epoch):
    return m.StepReport(epoch, epoch, 0.5, 1, 0.1, 0.1, 1, epoch, True)


def learnt(longest):
    patience, pulse = ProgressLimits(None), Pulse(0.0, 0.0, steps=10)
    patience.moved(pulse, longest)
    pulse.heard = longest + 1.0
    for epoch in range(2):
        patience.stepped((step_in(epoch),), 0, longest)
    return patience, pulse


def test_until_an_epoch_is_over_the_limits_are_long_and_after_the_last_step_again():
    patience, pulse = ProgressLimits(None), Pulse(0.0, 0.0, steps=10)
    patience.moved(pulse, 1.0)
    assert (patience.until_named(pulse), patience.until_given_up) == (UNLEARNT_NAME, GIVE_UP)
    patience, pulse = learnt(0.1)
    patience.stepped((m.StepReport(50, 3, 0.5, 1, 0.1, 0.1, 1, 1, True),), 50, 1.0)
    assert patience.until_named(pulse) == UNLEARNT_NAME


@pytest.mark.parametrize(("longest", "named"), [(0.1, 10.0), (4.0, 20.0), (30.0, 150.0), (90.0, 300.0)])
def test_later_naming_follows_the_longest_gap(longest, named):
    patience, pulse = learnt(longest)
    assert (patience.until_named(pulse), patience.until_given_up) == (named, GIVE_UP)


def test_the_first_steps_in_a_world_are_judged_as_if_nothing_were_known():
    patience, pulse = learnt(0.1)
    pulse.steps = 1
    assert patience.until_named(pulse) == UNLEARNT_NAME
    patience.moved(pulse, pulse.moved + 200.0)
    assert patience.longest == 0.1


def test_a_number_that_was_given_is_the_limit_of_all():
    patience = ProgressLimits(4.0)
    assert (patience.until_named(None), patience.until_given_up) == (4.0, 4.0)


def test_the_first_report_of_a_new_master_may_be_of_many_epochs_and_teaches_nothing():
    patience, pulse = ProgressLimits(None), Pulse(1.0, 0.0, steps=10)
    patience.stepped((step_in(3), step_in(4)), 0, 0.0)
    assert patience.until_named(pulse) == UNLEARNT_NAME
    patience.stepped((step_in(5),), 0, 0.0)
    assert patience.until_named(pulse) == NAME_FLOOR


@pytest.mark.parametrize("waiting", [{0, 1, 2}, set()])
def test_what_a_master_was_away_for_or_heard_late_teaches_nothing(waiting):
    r = experienced()
    r.waiting = waiting
    r.pass_time(1.0, progress=not waiting)
    r.now += 100.0  # it was suspended
    if waiting:
        r.post(e.Tick())
    r.waiting = set()
    r.pass_time(1.0)
    assert r.job.progress_limits.longest < 3.0


# ---- naming, and giving up ----

LOAD, VALIDATE = "train.py:31 in load", "train.py:80 in validate"


def tell(worker, where, *, moves=False, collectives=0):
    fields = {"where": where, "stack": [where], "moves": moves, "collectives": collectives, "last_collectives": []}
    return e.FromWorker(worker, m.Notice("worker_stuck", fields))


def answering(r, seconds, where, *, movers=(), after=0.3, tick=TICK):
    """Time passes without progress; who is asked where it stands says so a moment later. What the master does."""
    out, due = [], []
    for _ in range(round(seconds / tick)):
        done = r.pass_time(tick, progress=False, tick=tick)
        due += [(r.now + after, worker) for each in only(m.DumpStacks, done) for worker in each.to]
        for at, worker in [each for each in due if each[0] <= r.now]:
            due.remove((at, worker))
            done += r.post(tell(worker, where, moves=worker in movers))
        out += done
    return out


def killed(out):
    return [each.worker_id for each in only(i.KillWorker, out)]


def experienced(maximum=3, epochs=2):
    """A job that has come through an epoch, with steps of a moment."""
    run = Run(maximum=maximum, progress_timeout=None)
    run.train()
    for epoch in range(epochs):
        run.post(e.FromWorker(0, m.Progress((step_in(epoch),), 0, 0)))
    for record in run.job.records.values():  # beyond its first steps
        record.pulse.steps = 10
    run.pass_time(0.1)
    return run


def stuck(asked=True):
    """Worker 2 is, and was asked where it stands."""
    run = experienced()
    run.waiting = {0, 1}
    if asked:
        assert run.pass_time(NAME_FLOOR + 0.3, progress=False) == [i.Tell((2,), m.DumpStacks())]
    return run


def test_while_some_have_returned_another_may_be_writing_the_result_of_a_script():
    r = experienced()
    for worker in (1, 2):  # as in a plain loop, of which nobody knows how many steps it makes
        r.post(e.FromWorker(worker, m.Heartbeat(1, 0, 10**6, True, ending=True)))
    r.waiting = {1, 2}
    assert r.pass_time(UNLEARNT_NAME - 1, progress=False) == []
    assert r.pass_time(2, progress=False) == [i.Tell((0,), m.DumpStacks())]
    r.post(tell(0, "train.py:90 in export"))
    assert r.pass_time(GIVE_UP - UNLEARNT_NAME - 2, progress=False) == []
    r.post(e.FromWorker(0, m.Progress((step_in(2),), 0, 0)))  # it goes on after all
    assert not r.job.progress_limits.ending


def test_the_one_that_does_not_wait_is_named_with_its_line_and_replaced():
    r = stuck()
    r.post(tell(2, LOAD))
    r.pass_time(1.0, progress=False)
    (named,) = r.records("worker_stuck")
    assert (named["worker"], named["host"], named["where"]) == (2, "h", LOAD)
    assert r.remark(2) == f"stuck for 11 s, at {LOAD}"
    out = answering(r, GIVE_UP, LOAD)
    (kill,) = only(i.KillWorker, out)
    assert kill.reason.startswith("no progress for 301")
    assert kill.reason.endswith(f", at {LOAD}")
    assert len(only(m.DumpStacks, out[:-1])) == 1  # it is looked at once more before it is killed
    assert len(r.records("worker_stuck")) == 1


def test_who_moves_is_not_killed_until_it_is_found_to_hang():
    r = stuck()
    r.post(tell(2, LOAD))  # the loader's queue was empty, say
    assert killed(answering(r, GIVE_UP, VALIDATE, movers=(2,))) == []
    assert killed(answering(r, LOOK_AGAIN + 1, "train.py:85 in save")) == [2]
    assert r.records("worker_stuck")[-1]["where"] == "train.py:85 in save"


def test_one_that_does_not_answer_is_looked_at_by_its_launcher_and_what_it_says_itself_counts_for_more():
    r = stuck()
    assert r.pass_time(2.7, progress=False) == [i.ReadStacks(2)]
    r.post(e.StacksFound(2, "", "its process runs", has_session=True))
    r.pass_time(0.1, progress=False)
    assert r.remark(2).endswith("its process runs")  # its heartbeats come: it is not cut off
    r.post(tell(2, VALIDATE, moves=True))  # it needs Python's lock to answer
    assert killed(answering(r, GIVE_UP, VALIDATE, movers=(2,), after=2.5)) == []


def test_what_its_launcher_finds_is_where_it_stands():
    r = stuck()
    r.pass_time(3, progress=False)
    r.post(e.StacksFound(2, STACKS))
    assert r.records("worker_stuck")[0]["where"] == "/job/train.py:3 in load"


def test_who_sends_heartbeats_and_does_not_answer_is_asked_once_more():
    r = stuck(asked=False)
    assert killed(r.pass_time(GIVE_UP + ANSWER_SECONDS, progress=False)) == []
    assert killed(r.pass_time(TIME_TO_DUMP + 1, progress=False)) == [2]


def test_who_may_still_answer_at_this_moment_is_not_killed_yet():
    r = stuck(asked=False)
    r.pass_time(GIVE_UP - 1, progress=False)
    r.now = round(r.now) + 2.0
    r.job.records[2].suspicion.asked = r.now - ANSWER_SECONDS - TIME_TO_DUMP
    assert killed(r.post(e.Tick())) == []
    r.now += TICK
    assert killed(r.post(e.Tick())) == [2]


def test_who_ends_the_first_epoch_alone_is_not_blamed_before_its_heartbeat_says_that_it_is_through():
    r = experienced(epochs=1)
    r.pass_time(5.0)
    r.waiting = {1, 2}
    assert r.pass_time(60.0 + 10, progress=False) == []  # rank 0 evaluates
    out = r.post(e.FromWorker(0, m.Progress((step_in(1),), 0, 0)))
    for _ in range(20):  # heartbeats come every two seconds
        r.now += TICK
        out += r.post(e.Tick())
    assert out == []
    r.waiting = set()
    r.pass_time(1.0)
    assert r.job.progress_limits.longest > 60.0


def test_one_whose_stack_moves_is_named_later_and_not_killed_for_an_hour():
    r = stuck()
    r.post(tell(2, VALIDATE, moves=True))
    assert r.pass_time(GIVE_UP - NAME_FLOOR + 0.5, progress=False) == [i.Tell((2,), m.DumpStacks())]
    r.post(tell(2, "train.py:81 in validate", moves=True))
    out = answering(r, GIVE_UP_MOVING - 2 * GIVE_UP, VALIDATE, movers=(2,), tick=1.0)
    assert only(m.DumpStacks, out) == out != []
    assert len(out) <= GIVE_UP_MOVING / LOOK_AGAIN
    assert [named["where"] for named in r.records("worker_stuck")] == ["train.py:81 in validate"]
    assert killed(answering(r, 2 * GIVE_UP, VALIDATE, movers=(2,))) == [2]


def test_if_all_are_stuck_at_once_their_state_is_not_thrown_away():
    out = experienced().pass_time(GIVE_UP + 60, progress=False)
    assert only((m.DumpStacks, i.ReadStacks), out) == out
    assert only(i.ReadStacks, out)


def test_who_does_the_same_as_all_others_a_bit_slower_is_not_killed_as_soon_as_one_waits():
    r = experienced()
    r.pass_time(NAME_FLOOR + 0.3, progress=False)  # all validate, in calls of C that take long
    r.post(*(tell(worker, VALIDATE) for worker in range(3)))
    r.pass_time(GIVE_UP, progress=False)
    r.beats[0] += 1
    r.waiting = {0}
    assert killed(r.pass_time(GIVE_UP - 1, progress=False)) == []
    assert killed(answering(r, 3, VALIDATE)) == [1, 2]


def test_who_moves_is_not_killed_for_another_that_is_given_up():
    r = experienced(maximum=4)
    r.waiting = {2, 3}
    out = []
    while not killed(out) and r.now < 2 * GIVE_UP:
        out += answering(r, 1.0, "train.py:5 in f", movers=(1,), after=0.0)
    assert killed(out) == [0]


STACKS = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line 3 in load\n'


def test_of_a_silent_worker_its_launcher_tells_before_it_is_killed():
    r = Run()
    r.train()
    del r.beats[2]
    assert i.ReadStacks(2) in r.pass_time(7.5)
    r.post(e.StacksFound(2, "", "does not run: it is stopped (state T)"))
    assert r.remark(2).startswith("no heartbeat for ")
    reason = "no heartbeat for 10 s, does not run: it is stopped (state T)"
    out = r.pass_time(3)
    assert i.KillWorker(2, reason) in out
    assert [broken.to for broken in only(m.Broken, out)] == [(0, 1)]
    r.beats[2] = 5
    assert killed(r.pass_time(1)) == [], "a heartbeat of a worker that was given up means nothing"
    r.exit(2)
    assert (r.causes, r.records("worker_left")[0]["reason"]) == (["frozen"], reason)
    assert r.records("worker_stuck")[0]["why"] == "no heartbeat"


def test_all_who_hold_the_state_are_not_killed_for_a_call_that_holds_pythons_lock():
    r = Run(progress_timeout=None)
    r.train()
    beats = dict(r.beats)
    for worker in (0, 1, 2):  # heartbeats of different workers come at different times
        del r.beats[worker]
        r.pass_time(0.7)
    assert killed(r.pass_time(58)) == []
    assert {record["worker"] for record in r.records("worker_stuck")} == {0, 1, 2}
    assert r.remark(0).startswith("no heartbeat for 60 s")
    r.post(e.StacksFound(0, STACKS))
    assert r.records("worker_stuck")[-1]["where"] == "/job/train.py:3 in load"
    r.beats.update(beats)
    r.pass_time(1)
    assert not any(worker.remark for worker in r.job.workers)
    r.beats.clear()
    assert sorted(killed(r.pass_time(GIVE_UP + 1))) == [0, 1, 2]


def test_once_one_of_them_is_back_the_others_have_a_moment():
    r = Run(progress_timeout=None)
    r.train()
    beat = r.beats[0]
    r.beats.clear()
    r.pass_time(30)
    r.beats[0] = beat
    assert killed(r.pass_time(2)) == []
    assert sorted(killed(r.pass_time(2))) == [1, 2]


# ---- all wait ----

STEP, LOG = "train.py:9 in step", "train.py:20 in log"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([(STEP, 7), (STEP, 7), (LOG, 6)], [2]),  # it is behind
        ([(STEP, 5), (LOG, 7), (STEP, 5)], [1]),  # it left one out
        ([(STEP, 7), (LOG, 7), (STEP, 7)], [1]),  # it stands elsewhere
        ([(STEP, 7)] * 3, []),
        ([(STEP, 0), (LOG, 0)], [0, 1]),  # nobody can tell who is wrong
        ([(STEP, 0)] * 20 + [(LOG, 0)] * 20, list(range(8))),  # and some of many are enough
    ],
)
def test_if_all_wait_who_does_something_else_is_named_and_the_world_is_left(places, named):
    r = Run(minimum=1, maximum=len(places))
    r.train()
    r.waiting = set(range(len(places)))
    assert r.pass_time(10.5) == [i.Tell((worker,), m.DumpStacks()) for worker in range(len(places))]
    for worker, (where, collectives) in enumerate(places):
        r.post(tell(worker, where, collectives=collectives))
    (broken,) = r.pass_time(1)
    assert isinstance(broken.message, m.Broken)
    assert [record["worker"] for record in r.records("worker_stuck")] == named
    if len(named) == 1:
        assert f"worker {named[0]}, at {LOG}" in broken.message.reason
    assert broken.message.reason.endswith("; and 32 more") == (len(places) == 40)


def test_collectives_that_take_long_are_waited_for():
    r = experienced()
    asked = []
    for _ in range(3):
        r.waiting = {0, 1, 2}
        asked += only(m.DumpStacks, r.pass_time(NAME_FLOOR + 5, progress=False))
        r.waiting = set()
        r.pass_time(1.0)
    assert asked == [i.Tell((worker,), m.DumpStacks()) for worker in range(3)]
    r.waiting = {0, 1, 2}
    assert isinstance(r.pass_time(20 * (NAME_FLOOR + 6), progress=False)[-1].message, m.Broken)
    assert r.job.progress_limits.longest < NAME_FLOOR + 6
