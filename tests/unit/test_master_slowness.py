"""How the master tells from the times of steps who is slow, and what the job does about it."""

import random

import pytest
from play_kit import tell

from elasticdl.elastic.core.reporting import WINDOW
from elasticdl.job.messages import StepTimes
from elasticdl.master.core.slowness import SECONDS_BETWEEN_REPLACEMENTS, SlowRule, pace_of
from elasticdl.master.core.values import WorkerState
from elasticdl.master.core.worker_record import Pulse, WorkerRecord
from tests.stories import told_in

USUAL = (0.02, 0.1, 0.01, 16.0)  # seconds of data, compute and update, and samples

# Workers do by themselves what they are told to, and tell that they work as usual.
SLOW = """
a slow worker is replaced if that is asked for (1-3, replace_slow)
  wait 5; 1 works 0.02 0.4 0.01 16; wait 60 -> ...; worker_slow worker = 1; members = 0 2 3
  -> worker_launched reason = asked for, asked for, asked for, in place of another: worker 1 is slow: 3.3x the others (compute)
a slow worker is not replaced if that is not asked for (1-3)
  wait 5; 1 works 0.02 0.4 0.01 16; wait 60 -> ...; worker_slow worker = 1; worker_launched = 3; members = 0 1 2
in a job at its minimum the slow one leaves first (3-3, replace_slow, KIND)
  for KIND in gang, own_program
  wait 5; 1 works 0.02 0.4 0.01 16; wait 60 -> ...; launch away from node-1 3; ...; worker_left worker = 1; members = 0 2 3
  wait 600 -> nothing
a slow loader is named with its phase (4-4)
  wait 5; 3 works 0.082 0.1 0.01 16; wait 15 -> ...; worker_slow worker = 3; worker_slow phase = data
  -> worker_slow factor = 1.48; worker_slow seconds = 0.062; worker_slow host = node-3
  -> remark 3 = slow: 1.5x the others (data); remark 2 =
who has more samples is not slow for that (3-3)
  wait 5; 0 works 0.02 0.25 0.01 32; wait 60 -> ...; worker_slow = 0
one slow moment is not enough (2-2)
  wait 5; 1 works 0.02 0.5 0.01 16; wait 9; 1 works; wait 1; 1 works 0.02 0.5 0.01 16; wait 9; 1 works; wait 20
      -> ...; worker_slow = 0
who gets better is said to (2-2)
  wait 5; 1 works 0.02 0.3 0.01 16; wait 15 -> ...; worker_slow worker = 1
  1 works 0.02 0.15 0.01 16; wait 60 -> nothing; worker_slow = 1; worker_recovered = 0
  1 works; wait 15 -> nothing; worker_recovered worker = 1; remark 1 =
alone nobody is slow (1-2)
  wait 5; 1 works 0.02 0.3 0.01 16; wait 15; 0 killed; scale 1; wait 5 -> ...; members = 1; remark 1 =
  -> worker_slow worker = 1; worker_recovered worker = 1
at the end nobody is replaced (1-3, replace_slow)
  wait 5; 1 works 0.02 0.4 0.01 16; wait 5; 0 steps 70 of 70; wait 60 -> ...; worker_slow worker = 1; worker_launched = 3
while one looks slow nothing is concluded from the number of workers (1-3, scale_policy=efficiency, min_efficiency=0.6)
  wait 5; takes 1; wait 10; takes 0.55; wait 10 -> ...; sizes = 1 2 3
  1 works 0.02 0.4 0.01 16; wait 5; takes 0.9; wait 4 -> nothing; worker_slow = 0
  wait 23 -> ...; worker_slow worker = 1; sizes = 1 2 3 2; members = ...0...
"""


@pytest.mark.parametrize("story", told_in(SLOW))
def test_slow(story):
    tell(story, obedient=True, work=USUAL)


# ---- the rule by itself ----

BEAT = 0.5


class Crew:
    """Members of one world, whose heartbeats come twice a second."""

    def __init__(self, *workers, replace=False):
        self.judge = SlowRule(replace=replace)
        self.records = [WorkerRecord(n, "", WorkerState.MEMBER, host=f"node-{n}", rank=n) for n in range(len(workers))]
        self.workers = list(workers)
        self.now, self.news, self.replaced = 0.0, [], []

    def beat(self, seconds, noise=lambda: 1.0, every=BEAT):
        until = self.now + seconds
        while self.now < until:
            busy = [[part * noise() for part in worker[:3]] for worker in self.workers]
            step = max(map(sum, busy)) + 0.01
            for record, worker, (data, compute, update) in zip(self.records, self.workers, busy, strict=True):
                times = StepTimes(WINDOW, data, compute, step - data - compute - update, update, worker[3])
                record.pulse = Pulse(self.now, self.now, times=times)
                record.step += max(1, round(every / step))
            records, slow = self.judge.judge(self.records, self.now)
            self.news += records
            if record := self.judge.due(slow, self.now):
                self.replaced.append(record.worker_id)
            self.now += every


def test_the_pace_tells_waiting_for_others_from_the_sum():
    crew = Crew((0.0, 0.3, 0.0, 8.0), (0.0, 0.1, 0.0, 8.0))
    crew.beat(1)
    pace = pace_of(crew.records)
    assert (pace.busy, pace.waited, pace.least_waited) == pytest.approx((0.2, 0.11, 0.01))


def test_ten_hours_of_uneven_steps_raise_no_alarm():
    """Medians over 32 heavy-tailed steps scatter by some ten percent."""
    seeded = random.Random(2)
    crew = Crew(USUAL, USUAL)
    crew.beat(36_000, noise=lambda: seeded.lognormvariate(0.0, 0.12))
    assert crew.news == []


def test_the_less_it_helps_the_rarer_is_one_replaced():
    slow = (0.02, 0.4, 0.01, 16.0)
    crew = Crew(USUAL, USUAL, slow, replace=True)  # whoever comes in its place is as slow
    crew.beat(4700, every=7.0)
    assert crew.replaced == [2] * 5  # after 0, 5, 10, 20 and 40 minutes
    crew.workers[2] = USUAL
    crew.beat(7300, every=7.0)
    crew.workers[2] = slow
    crew.beat(60 + SECONDS_BETWEEN_REPLACEMENTS, every=7.0)
    assert crew.replaced == [2] * 7  # it had helped for long, so it begins anew
