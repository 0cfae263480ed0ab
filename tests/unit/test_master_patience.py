"""Ten hours of ordinary steps, in virtual time: nobody is taken to be stuck who is not, and who is, is named soon."""

import os
import random
from pathlib import Path

import pytest
from test_master_job import TICK, Run

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.rules.progress_limits import (
    GIVE_UP_FLOOR,
    GIVE_UP_MOVING,
    MOVING_NAME_FLOOR,
    NAME_FACTOR,
    NAME_FLOOR,
    UNLEARNT_GIVE_UP,
    UNLEARNT_NAME,
    ProgressLimits,
)
from elasticdl.master.rules.watching import LOOK_AGAIN
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import Pulse

# Seconds of 4,000 steps in a row of one worker, on two cores that other programs kept busy.
MEASURED = Path(__file__).with_name("measured_step_seconds.txt")
HOUR = 3600.0
BEAT = 0.5
LONGEST_BURST = 8.0
SEED = int(os.environ.get("ELASTICDL_PATIENCE_SEED", "1"))
ALARMS = (i.DumpStacks, i.ReadStacks, i.KillWorker, i.BreakWorld)


class Training:
    """What the workers of one job do, one step after another; each waits for the slowest."""

    def __init__(self, seed, scale, workers=3, steps_per_epoch=500, validation=0.0, checkpoint=0.0, compile=0.0):
        """``scale``: of the measured steps. ``validation``: seconds at the end of an epoch in which nothing is told."""
        self.draw = random.Random(seed)
        self.steps = [float(line) * scale for line in MEASURED.read_text().split()]
        self.workers, self.steps_per_epoch = workers, steps_per_epoch
        self.validation, self.checkpoint = validation, checkpoint
        self.step = self.epoch = self.steps_epoch = 0
        self.progress = [0] * workers
        self.waiting = [False] * workers
        self.ready = [0.0] * workers  # when each comes to the collective
        self.stuck = None
        self._begin(0.0, extra=compile)

    def _begin(self, now, extra=0.0):
        """A step, which takes longer now and then."""
        noise = [self._burst() if self.draw.random() < 1e-3 else 0.0 for _ in range(self.workers)]
        self.ready = [now + extra + self.draw.choice(self.steps) + more for more in noise]
        self.waiting = [False] * self.workers

    def _burst(self):
        """Of somebody else's load, a disk's or a network's, with a heavy tail."""
        return min(LONGEST_BURST, 0.5 * self.draw.paretovariate(1.2))

    def advance(self, until):
        """Everything that happens till then."""
        while True:
            for worker in range(self.workers):
                if not self.waiting[worker] and self.ready[worker] <= until and worker != self.stuck:
                    self.waiting[worker] = True
                    self.progress[worker] += 1
            if not all(self.waiting):
                return
            self._end_step(max(self.ready))

    def _end_step(self, now):
        self.step += 1
        self.steps_epoch = self.epoch
        self.progress = [count + 1 for count in self.progress]
        extra = 0.0
        if self.step % 100 == 0:
            extra += self.checkpoint * self.draw.lognormvariate(0.0, 0.5)
        if self.step % self.steps_per_epoch == 0:
            self.epoch += 1
            extra += self.validation * self.draw.lognormvariate(0.0, 0.25)
        self._begin(now, extra)


class LongRun:
    def __init__(self, training, **settings):
        workers = WorkerRange(minimum=1, maximum=training.workers)
        self.job = Job(Settings(workers, **settings))
        self.training = training
        self.now, self.reported = 0.0, 0
        self.alarms, self.records = [], []
        ids = range(training.workers)
        self.post(e.Tick())
        for worker in ids:
            self.post(e.WorkerPlaced(worker, "h", 1))
            self.post(e.WorkerConnected(worker, "h", 1))
        for worker in ids:
            self.post(e.JoinRequested(worker, 0, 0, False))

    def post(self, event):
        for instruction in self.job.step(event, self.now):
            if isinstance(instruction, ALARMS):
                self.alarms.append((self.now, instruction))
            elif isinstance(instruction, i.Record):
                self.records.append((self.now, instruction.event, instruction.fields))

    def train(self, seconds):
        training, end = self.training, self.now + seconds
        while self.now < end:
            self.now += BEAT
            training.advance(self.now)
            for worker in range(training.workers):
                beat = (1, training.step, training.progress[worker], training.waiting[worker])
                self.post(e.HeartbeatReceived(worker, *beat))
            if training.step > self.reported:
                self.reported = training.step
                step = e.StepReport(
                    training.step, training.steps_epoch, 0.5, 32, 0.1, 0.1, 1, 32 * training.step, False
                )
                self.post(e.ProgressReported(0, (step,), 0, 0))
            self.post(e.Tick())


JOBS = {
    "steps of 100 ms": {"scale": 3.0, "steps_per_epoch": 2000, "workers": 2},
    "steps of 1 s, checkpoints": {"scale": 30.0, "steps_per_epoch": 300, "checkpoint": 15.0},
    "a validation loop of the user's own": {"scale": 4.0, "steps_per_epoch": 1000, "validation": 40.0},
    "slow to compile, long epochs": {"scale": 20.0, "steps_per_epoch": 6000, "compile": 100.0, "checkpoint": 4.0},
    "all of that, and steps of 6 s": {"scale": 200.0, "steps_per_epoch": 100, "validation": 50.0, "checkpoint": 20.0},
}


def require_no_alarm(run):
    assert run.alarms == []
    assert not [event for _, event, _ in run.records if event in ("worker_stuck", "warning")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", JOBS)
def test_ten_hours_of_ordinary_steps_give_no_alarm(kind):
    run = LongRun(Training(SEED, **JOBS[kind]))
    run.train(10 * HOUR)
    assert run.training.step > 1000
    require_no_alarm(run)


@pytest.mark.parametrize("kind", JOBS)
def test_who_hangs_after_an_hour_without_alarm_is_asked_at_the_learnt_limit(kind):
    run = LongRun(Training(3, **JOBS[kind]))
    run.train(HOUR)
    require_no_alarm(run)
    patience = run.job._workers.progress_limits
    limit = max(NAME_FLOOR, NAME_FACTOR * patience.longest)
    run.training.stuck = 1
    began = run.now
    run.train(UNLEARNT_GIVE_UP)
    at, asked = run.alarms[0]
    assert asked == i.DumpStacks(1)
    assert at - began <= min(limit, UNLEARNT_GIVE_UP) + max(run.training.steps) + 2 * BEAT


# ---- limits ----


def step_in(epoch):
    return e.StepReport(epoch, epoch, 0.5, 1, 0.1, 0.1, 1, epoch, True)


def learnt(longest):
    patience, pulse = ProgressLimits(None), Pulse(0.0, 0.0, steps=10)
    patience.moved(pulse, longest)
    pulse.heard = longest + 1.0
    for epoch in range(2):
        patience.stepped((step_in(epoch),), 0, longest)
    return patience, pulse


def test_until_an_epoch_is_over_the_limits_are_long():
    patience, pulse = ProgressLimits(None), Pulse(0.0, 0.0, steps=10)
    patience.moved(pulse, 1.0)
    assert (patience.until_named(pulse), patience.until_given_up(pulse)) == (UNLEARNT_NAME, UNLEARNT_GIVE_UP)


def test_after_the_last_step_they_are_long_again():
    patience, pulse = learnt(0.1)
    patience.stepped((e.StepReport(50, 3, 0.5, 1, 0.1, 0.1, 1, 1, True),), 50, 1.0)
    assert patience.until_named(pulse) == UNLEARNT_NAME


def test_while_some_have_returned_another_may_be_writing_the_result_of_a_script():
    r = experienced()
    for worker in (1, 2):  # as in a plain loop, of which nobody knows how many steps it makes
        r.post(e.HeartbeatReceived(worker, 1, 0, 10**6, True, ending=True))
    r.waiting = {1, 2}
    assert r.pass_time(UNLEARNT_NAME - 1, progress=False) == []
    assert r.pass_time(2, progress=False) == [i.DumpStacks(0)]
    r.post(tell(0, "train.py:90 in export"))
    assert r.pass_time(UNLEARNT_GIVE_UP - UNLEARNT_NAME - 2, progress=False) == []
    r.post(e.ProgressReported(0, (step_in(2),), 0, 0))  # it goes on after all
    assert not r.job._workers.progress_limits.ending


@pytest.mark.parametrize(
    ("longest", "named", "given_up"), [(0.1, 10.0, 60.0), (4.0, 20.0, 80.0), (30.0, 150.0, 300.0), (90.0, 300.0, 300.0)]
)
def test_later_they_follow_the_longest_gap(longest, named, given_up):
    patience, pulse = learnt(longest)
    assert (patience.until_named(pulse), patience.until_given_up(pulse)) == (named, given_up)


def test_the_first_steps_in_a_world_are_judged_as_if_nothing_were_known():
    patience, pulse = learnt(0.1)
    pulse.steps = 1
    assert patience.until_named(pulse) == UNLEARNT_NAME
    patience.moved(pulse, pulse.moved + 200.0)
    assert patience.longest == 0.1


def test_a_number_that_was_given_is_the_limit_of_all():
    patience = ProgressLimits(4.0)
    assert (patience.until_named(None), patience.until_given_up(None)) == (4.0, 4.0)


def test_the_first_report_of_a_new_master_may_be_of_many_epochs_and_teaches_nothing():
    patience, pulse = ProgressLimits(None), Pulse(1.0, 0.0, steps=10)
    patience.stepped((step_in(3), step_in(4)), 0, 0.0)
    assert patience.until_named(pulse) == UNLEARNT_NAME
    patience.stepped((step_in(5),), 0, 0.0)
    assert patience.until_named(pulse) == NAME_FLOOR


def test_a_collective_that_a_master_was_away_for_teaches_nothing():
    r = experienced()
    r.waiting = {0, 1, 2}
    r.pass_time(1.0, progress=False)
    r.now += 90.0
    r.post(e.Tick())
    r.waiting = set()
    r.pass_time(1.0)
    assert r.job._workers.progress_limits.longest < 3.0


def test_what_a_master_heard_late_teaches_nothing():
    r = experienced()
    r.now += 100.0  # it was suspended
    for worker in range(3):
        r.beats[worker] += 1
        r.post(e.HeartbeatReceived(worker, 1, 0, r.beats[worker], False))
    r.pass_time(1.0)
    assert r.job._workers.progress_limits.longest < 1.0


# ---- naming, and giving up ----


def tell(worker, where, *, moves=False, collectives=0):
    fields = {"where": where, "stack": [where], "moves": moves, "collectives": collectives, "last_collectives": []}
    return e.NoticeReported(worker, "worker_stuck", fields)


def answering(r, seconds, where, *, moves=False, after=0.3, tick=TICK):
    """Time passes without progress; who is asked where it stands says so a moment later. What the master does."""
    out, due = [], []
    for _ in range(round(seconds / tick)):
        done = r.pass_time(tick, progress=False, tick=tick)
        due += [(r.now + after, each.worker_id) for each in done if isinstance(each, i.DumpStacks)]
        for at, worker in [each for each in due if each[0] <= r.now]:
            due.remove((at, worker))
            done += r.post(tell(worker, where, moves=moves))
        out += done
    return out


def killed(out):
    return [each.worker_id for each in out if isinstance(each, i.KillWorker)]


def experienced(maximum=3):
    """A job that has come through an epoch, with steps of a moment."""
    run = Run(maximum=maximum, progress_timeout=None)
    run.train()
    for epoch in range(2):
        run.post(e.ProgressReported(0, (step_in(epoch),), 0, 0))
    forget_first_steps(run)
    run.pass_time(0.1)
    return run


def forget_first_steps(run):
    for record in run.job._workers.records.values():
        record.pulse.steps = 10


def test_the_one_that_does_not_wait_is_named_with_its_line_and_replaced():
    r = experienced()
    r.waiting = {0, 1}
    out = r.pass_time(NAME_FLOOR + 0.3, progress=False)
    assert out == [i.DumpStacks(2)]
    r.post(tell(2, "train.py:31 in load"))
    r.pass_time(1.0, progress=False)
    (named,) = r.records("worker_stuck")
    assert (named["worker"], named["host"], named["where"]) == (2, "h", "train.py:31 in load")
    assert r.job.view().workers[2].remark == "stuck for 11 s, at train.py:31 in load"
    out = answering(r, GIVE_UP_FLOOR, "train.py:31 in load")
    (kill,) = [each for each in out if isinstance(each, i.KillWorker)]
    assert kill.reason.startswith("no progress for 61")
    assert kill.reason.endswith(", at train.py:31 in load")
    assert [type(each) for each in out[:-1]].count(i.DumpStacks) == 1  # it is looked at once more before it is killed
    assert len(r.records("worker_stuck")) == 1


def test_who_stood_still_in_one_moment_and_moves_since_is_not_killed():
    r = experienced()
    r.waiting = {0, 1}
    r.pass_time(NAME_FLOOR + 0.3, progress=False)
    r.post(tell(2, "train.py:31 in load"))  # the loader's queue was empty, say
    assert killed(answering(r, UNLEARNT_GIVE_UP, "train.py:80 in validate", moves=True)) == []


def test_who_moved_when_it_was_looked_at_and_hangs_since_is_found_out():
    r = experienced()
    r.waiting = {0, 1}
    answering(r, GIVE_UP_FLOOR + 30, "train.py:80 in validate", moves=True)
    out = answering(r, LOOK_AGAIN + 1, "train.py:85 in save")
    assert killed(out) == [2]
    assert r.records("worker_stuck")[-1]["where"] == "train.py:85 in save"


def test_what_a_worker_says_itself_counts_for_more_than_what_its_launcher_says():
    r = experienced()
    r.waiting = {0, 1}
    assert r.pass_time(NAME_FLOOR + 3, progress=False) == [i.DumpStacks(2), i.ReadStacks(2)]
    r.post(e.StacksFound(2, "", "its process runs", has_session=True))
    r.pass_time(0.1, progress=False)
    assert r.job.view().workers[2].remark.endswith("its process runs")  # its heartbeats come: it is not cut off
    r.post(tell(2, "train.py:80 in validate", moves=True))  # it needs Python's lock to answer
    assert killed(answering(r, UNLEARNT_GIVE_UP, "train.py:80 in validate", moves=True, after=3.0)) == []


def test_who_sends_heartbeats_and_does_not_answer_has_the_longer_time():
    r = experienced()
    r.waiting = {0, 1}
    assert killed(r.pass_time(UNLEARNT_GIVE_UP - 1, progress=False)) == []
    assert killed(r.pass_time(2, progress=False)) == [2]


def test_who_ends_the_first_epoch_alone_is_not_blamed_before_its_heartbeat_says_that_it_is_through():
    r = Run(maximum=3, progress_timeout=None)
    r.train()
    r.post(e.ProgressReported(0, (step_in(0),), 0, 0))
    forget_first_steps(r)
    r.pass_time(5.0)
    r.waiting = {1, 2}
    assert r.pass_time(GIVE_UP_FLOOR + 10, progress=False) == []  # rank 0 evaluates
    out = r.post(e.ProgressReported(0, (step_in(1),), 0, 0))
    for _ in range(20):  # heartbeats come every two seconds
        r.now += TICK
        out += r.post(e.Tick())
    assert out == []
    r.waiting = set()
    r.pass_time(1.0)
    assert r.job._workers.progress_limits.longest > GIVE_UP_FLOOR


def test_one_that_goes_on_is_remarked_no_more():
    r = experienced()
    r.waiting = {0, 1}
    r.pass_time(NAME_FLOOR + 0.3, progress=False)
    r.post(tell(2, "train.py:31 in load"))
    r.waiting = set()
    r.pass_time(1.0)
    assert not any(worker.remark for worker in r.job.view().workers)


def test_one_whose_stack_moves_is_named_later_and_not_killed_for_an_hour():
    r = experienced()
    r.waiting = {0, 1}
    r.pass_time(NAME_FLOOR + 0.3, progress=False)
    r.post(tell(2, "train.py:80 in validate", moves=True))
    out = r.pass_time(MOVING_NAME_FLOOR - NAME_FLOOR + 0.5, progress=False)
    assert out == [i.DumpStacks(2)]
    r.post(tell(2, "train.py:81 in validate", moves=True))
    assert [named["where"] for named in r.records("worker_stuck")] == ["train.py:81 in validate"]
    out = answering(r, GIVE_UP_MOVING - 2 * MOVING_NAME_FLOOR, "train.py:82 in validate", moves=True, tick=1.0)
    assert {type(each) for each in out} == {i.DumpStacks}
    assert len(out) <= GIVE_UP_MOVING / LOOK_AGAIN
    assert len(r.records("worker_stuck")) == 1
    assert killed(answering(r, 2 * MOVING_NAME_FLOOR, "train.py:82 in validate", moves=True)) == [2]


def test_if_all_are_stuck_at_once_their_state_is_not_thrown_away():
    r = experienced()
    out = r.pass_time(UNLEARNT_GIVE_UP + 60, progress=False)
    assert {type(each) for each in out} == {i.DumpStacks, i.ReadStacks}


def test_who_does_the_same_as_all_others_a_bit_slower_is_not_killed_as_soon_as_one_waits():
    r = experienced()
    r.pass_time(NAME_FLOOR + 0.3, progress=False)  # all validate, in calls of C that take long
    for worker in range(3):
        r.post(tell(worker, "train.py:80 in validate"))
    r.pass_time(UNLEARNT_GIVE_UP, progress=False)
    r.beats[0] += 1
    r.waiting = {0}
    assert r.pass_time(UNLEARNT_GIVE_UP - 1, progress=False) == []
    assert killed(answering(r, 3, "train.py:80 in validate")) == [1, 2]


def test_one_that_does_not_answer_is_looked_at_by_its_launcher():
    r = experienced()
    r.waiting = {0, 1}
    assert r.pass_time(NAME_FLOOR + 3, progress=False) == [i.DumpStacks(2), i.ReadStacks(2)]
    text = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line 31 in load\n'
    r.post(e.StacksFound(2, text))
    assert r.records("worker_stuck")[0]["where"] == "/job/train.py:31 in load"


def test_of_a_silent_worker_its_launcher_tells_before_it_is_killed():
    r = Run()
    r.train()
    del r.beats[2]
    assert i.ReadStacks(2) in r.pass_time(7.5)
    r.post(e.StacksFound(2, "", "does not run: it is stopped (state T)"))
    assert r.job.view().workers[2].remark.startswith("no heartbeat for ")
    out = r.pass_time(3)
    reason = "no heartbeat for 10 s, does not run: it is stopped (state T)"
    assert i.KillWorker(2, reason) in out
    r.exit(2)
    assert r.records("worker_left")[0]["reason"] == reason
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
    assert r.job.view().workers[0].remark.startswith("no heartbeat for 60 s")
    r.post(e.StacksFound(0, 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/a.py", line 3 in f\n'))
    assert r.records("worker_stuck")[-1]["where"] == "/a.py:3 in f"
    r.beats.update(beats)
    r.pass_time(1)
    assert not any(worker.remark for worker in r.job.view().workers)
    r.beats.clear()
    assert sorted(killed(r.pass_time(UNLEARNT_GIVE_UP + 1))) == [0, 1, 2]


def test_once_one_of_them_is_back_the_others_have_a_moment():
    r = Run(progress_timeout=None)
    r.train()
    beat = r.beats[0]
    r.beats.clear()
    r.pass_time(30)
    r.beats[0] = beat
    assert killed(r.pass_time(2)) == []
    assert sorted(killed(r.pass_time(2))) == [1, 2]


def test_who_moves_is_not_killed_for_another_that_is_given_up():
    r = experienced(maximum=4)
    r.waiting = {2, 3}
    out, due = [], []
    for _ in range(round((UNLEARNT_GIVE_UP + 5) / TICK)):
        done = r.pass_time(TICK, progress=False)
        for worker in [each.worker_id for each in done if isinstance(each, i.DumpStacks)]:
            due.append(tell(worker, "train.py:5 in f", moves=worker == 1))
        while due:
            done += r.post(due.pop())
        out += done
        if killed(out):
            break
    assert killed(out) == [0]


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([("train.py:9 in step", 7), ("train.py:9 in step", 7), ("train.py:20 in log", 6)], [2]),  # it is behind
        ([("train.py:9 in step", 5), ("train.py:20 in log", 7), ("train.py:9 in step", 5)], [1]),  # it left one out
        ([("train.py:9 in step", 7), ("train.py:20 in log", 7), ("train.py:9 in step", 7)], [1]),  # it stands elsewhere
        ([("train.py:9 in step", 7)] * 3, []),
    ],
)
def test_if_all_wait_who_does_something_else_is_named_and_the_world_is_left(places, named):
    r = Run()
    r.train()
    r.waiting = {0, 1, 2}
    assert r.pass_time(10.5) == [i.DumpStacks(worker) for worker in range(3)]
    for worker, (where, collectives) in enumerate(places):
        r.post(tell(worker, where, collectives=collectives))
    (broken,) = r.pass_time(1)
    assert isinstance(broken, i.BreakWorld)
    assert [record["worker"] for record in r.records("worker_stuck")] == named
    assert all(f"worker {worker}, at train.py:20 in log" in broken.reason for worker in named)


def test_if_half_of_many_stand_elsewhere_one_of_each_half_is_named():
    r = Run(minimum=1, maximum=40)
    r.train()
    r.waiting = set(range(40))
    r.pass_time(10.5)
    for worker in range(40):
        r.post(tell(worker, "train.py:9 in step" if worker < 20 else "train.py:20 in log"))
    (broken,) = r.pass_time(1)
    assert [record["worker"] for record in r.records("worker_stuck")] == [0, 20]
    assert broken.reason.endswith("; and 38 more")


def test_collectives_that_take_long_are_waited_for():
    r = experienced()
    asked = []
    for _ in range(3):
        r.waiting = {0, 1, 2}
        asked += r.pass_time(NAME_FLOOR + 5, progress=False)
        r.waiting = set()
        r.pass_time(1.0)
    assert [each for each in asked if isinstance(each, i.DumpStacks)] == [i.DumpStacks(worker) for worker in range(3)]
    r.waiting = {0, 1, 2}
    assert isinstance(r.pass_time(20 * (NAME_FLOOR + 6), progress=False)[-1], i.BreakWorld)
    assert r.job._workers.progress_limits.longest < NAME_FLOOR + 6


def test_of_two_in_two_places_nobody_can_tell_who_is_wrong():
    r = Run(minimum=1, maximum=2)
    r.train()
    r.waiting = {0, 1}
    r.pass_time(10.5)
    r.post(tell(0, "train.py:9 in step"), tell(1, "train.py:20 in log"))
    r.pass_time(1)
    assert [record["worker"] for record in r.records("worker_stuck")] == [0, 1]
