"""How the master tells from the times of steps who is slow, and what the job does about it."""

import random

import pytest
from master_kit import Cluster

from elasticdl.elastic.core.reporting import WINDOW
from elasticdl.job import messages as m
from elasticdl.job.messages import Pace, StepTimes
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.slowness import (
    MOST_SECONDS_BETWEEN,
    SECONDS_BETWEEN_REPLACEMENTS,
    SECONDS_TO_JUDGE,
    SlowRule,
    pace_of,
)
from elasticdl.master.core.values import WorkerState
from elasticdl.master.core.worker_record import Pulse, WorkerRecord

BEAT = 0.5


class Crew:
    """Members of one world, whose heartbeats come twice a second."""

    def __init__(self, *workers, replace=False):
        self.judge = SlowRule(replace=replace)
        self.records = [WorkerRecord(n, "", WorkerState.MEMBER, host=f"node-{n}", rank=n) for n in range(len(workers))]
        self.workers = list(workers)  # (data, compute, update, samples) each
        self.now = 0.0
        self.news = []
        self.replaced = []

    def beat(self, seconds, noise=lambda: 1.0, every=BEAT):
        until = self.now + seconds
        while self.now < until:
            busy = [[part * noise() for part in worker[:3]] for worker in self.workers]
            step = max(map(sum, busy)) + 0.01
            for record, worker, (data, compute, update) in zip(self.records, self.workers, busy, strict=True):
                wait = step - data - compute - update
                times = StepTimes(WINDOW, data, compute, wait, update, worker[3])
                record.pulse = Pulse(self.now, self.now, times=times)
                record.step += max(1, round(every / step))
            records, slow = self.judge.judge(self.records, self.now)
            self.news += records
            if record := self.judge.due(slow, self.now):
                self.replaced.append(record.worker_id)
            self.now += every

    def named(self):
        return [(record.event, record.fields["worker"]) for record in self.news]


USUAL = (0.02, 0.1, 0.01, 16.0)


def test_a_slow_loader_is_named_with_its_phase():
    crew = Crew(USUAL, USUAL, USUAL, (0.082, 0.1, 0.01, 16.0))
    crew.beat(SECONDS_TO_JUDGE + 1)
    [entry] = crew.news
    assert entry == i.Record(
        "worker_slow", {"worker": 3, "host": "node-3", "phase": "data", "factor": 1.48, "seconds": 0.062}
    )
    view = crew.records[3].view()
    assert view.remark == "slow: 1.5x the others (data)"
    assert not any(record.view().remark for record in crew.records[:3])


def test_how_slow_a_worker_is_is_said_of_its_whole_work_and_not_of_a_phase_that_costs_others_nothing():
    crew = Crew((0.00001, 0.1, 0.01, 16.0), (0.08, 0.1, 0.01, 16.0))
    crew.beat(SECONDS_TO_JUDGE + 1)
    assert crew.records[1].view().remark == "slow: 1.7x the others (data)"


def test_who_has_more_samples_is_not_slow_for_that():
    crew = Crew((0.0, 0.2, 0.0, 2.0), (0.0, 0.1, 0.0, 1.0), (0.0, 0.1, 0.0, 1.0))
    crew.beat(60)
    assert crew.news == []


def test_one_slow_moment_is_not_enough():
    crew = Crew(USUAL, USUAL)
    for _ in range(20):
        crew.workers[1] = (0.02, 0.5, 0.01, 16.0)
        crew.beat(SECONDS_TO_JUDGE - 1)
        crew.workers[1] = USUAL
        crew.beat(1)
    assert crew.news == []


def test_slow_steps_take_longer_to_judge():
    crew = Crew((0.0, 30.0, 0.0, 8.0), (0.0, 10.0, 0.0, 8.0))
    for _ in range(40):  # heartbeats within one step
        for record, compute in zip(crew.records, (30.0, 10.0), strict=True):
            record.pulse = Pulse(crew.now, crew.now, times=StepTimes(9, 0.0, compute, 31.0 - compute, 0.0, 8.0))
        crew.news += crew.judge.judge(crew.records, crew.now)[0]
        crew.now += BEAT
    assert crew.news == []


def test_the_pace_tells_waiting_for_others_from_the_sum():
    crew = Crew((0.0, 0.3, 0.0, 8.0), (0.0, 0.1, 0.0, 8.0))
    crew.beat(1)
    pace = pace_of(crew.records)
    assert (pace.busy, pace.waited, pace.least_waited) == pytest.approx((0.2, 0.11, 0.01))


def test_who_gets_better_is_said_to():
    crew = Crew(USUAL, (0.02, 0.3, 0.01, 16.0))
    crew.beat(SECONDS_TO_JUDGE + 1)
    crew.workers[1] = (0.02, 0.15, 0.01, 16.0)  # between both limits
    crew.beat(60)
    assert crew.named() == [("worker_slow", 1)]
    crew.workers[1] = USUAL
    crew.beat(SECONDS_TO_JUDGE + 1)
    assert crew.named() == [("worker_slow", 1), ("worker_recovered", 1)]
    assert crew.records[1].slow is None


def test_in_another_world_nothing_new_is_known_yet():
    crew = Crew(USUAL, (0.02, 0.3, 0.01, 16.0), replace=True)
    crew.beat(SECONDS_TO_JUDGE + 1)
    crew.replaced.clear()
    crew.records[0].pulse = Pulse(crew.now, crew.now, times=StepTimes(2, *USUAL[:2], 0.0, 0.0, 16.0))
    later = crew.now + MOST_SECONDS_BETWEEN
    assert crew.judge.judge(crew.records, later) == ([], [])  # what was seen before replaces nobody
    assert crew.records[1].slow is not None
    assert pace_of(crew.records[:1]) == Pace()


def test_alone_nobody_is_slow():
    crew = Crew(USUAL, (0.02, 0.3, 0.01, 16.0))
    crew.beat(SECONDS_TO_JUDGE + 1)
    left = crew.records[1:]
    for _ in range(2):
        crew.news += crew.judge.judge(left, crew.now, alone=True)[0]
    assert crew.named() == [("worker_slow", 1), ("worker_recovered", 1)]
    assert left[0].slow is None


def test_ten_hours_of_uneven_steps_raise_no_alarm():
    """Medians over 32 heavy-tailed steps scatter by some ten percent."""
    seeded = random.Random(2)
    crew = Crew(USUAL, USUAL)
    crew.beat(36_000, noise=lambda: seeded.lognormvariate(0.0, 0.12))
    assert crew.news == []


class Town(Cluster):
    """Its workers tell what their steps go into. ``compute``: seconds of those that are slower than the others."""

    def __init__(self, workers, minimum=1, **settings):
        super().__init__(minimum, workers, **settings)
        self.compute, self.is_full = {}, False
        self.live(5)

    def carry_out(self, instruction):
        super().carry_out(instruction)
        if isinstance(instruction, i.LaunchWorker):
            self.find_place(instruction.worker_id)

    def find_place(self, worker_id):
        if self.is_full:
            del self.workers[worker_id]
            self.post(e.WorkerPending(worker_id, "0/3 nodes are available"))
        else:
            self.place(worker_id, f"node-{worker_id}")

    def act(self, worker):
        super().act(worker)
        if worker.world and not worker.asked and worker.worker_id in self.workers:
            times = {
                member.worker_id: self.compute.get(member.worker_id, 0.1)
                for member in self.worlds[worker.world].members
            }
            mine, slowest = times[worker.worker_id], max(times.values())
            told = StepTimes(WINDOW, 0.0, mine, slowest - mine + 0.01, 0.0, 8.0)
            self.post(
                e.FromWorker(worker.worker_id, m.Heartbeat(worker.world, worker.step, worker.progress, False, told))
            )


def slow_one(workers=3, seconds=60, **settings):
    """A job whose worker 1 becomes slow."""
    town = Town(workers, **settings)
    town.compute[1] = 0.4
    town.is_full = settings.get("minimum") == workers
    town.live(seconds)
    return town


@pytest.mark.parametrize("asked", [True, False])
def test_a_slow_worker_is_replaced_if_that_is_asked_for(asked):
    town = slow_one(replace_slow=asked)
    assert [entry["worker"] for entry in town.records("worker_slow")] == [1]
    reasons = [entry["reason"] for entry in town.records("worker_launched")][3:]
    assert reasons == ["in place of another: worker 1 is slow: 4.0x the others (compute)"] * asked
    assert town.members == ({0, 2, 3} if asked else {0, 1, 2})


@pytest.mark.parametrize("gang", [True, False])
def test_in_a_job_at_its_minimum_the_slow_one_leaves_first(gang):
    town = Town(3, minimum=3, replace_slow=True, gang=gang)
    town.compute[1] = 0.4
    town.live(60)
    assert [entry["worker"] for entry in town.records("worker_left")] == [1]
    assert [each.away_from for each in town.out if isinstance(each, i.LaunchWorker)][3:] == [("node-1",)]
    assert town.members == {0, 2, 3}
    town.live(600)
    assert len(town.records("worker_launched")) == 4


def test_if_there_are_too_many_the_slow_one_leaves():
    town = slow_one()
    town.post(e.ScaleRequested(WorkerRange(minimum=1, maximum=2)))
    town.live(5)
    assert town.members == {0, 2}


def test_while_one_looks_slow_nothing_is_concluded_from_the_number_of_workers():
    town = Town(3, scale_policy="efficiency", min_efficiency=0.6)
    for seconds in (1.0, 0.55):
        town.train(seconds)
        town.live(10)
    assert len(town.members) == 3
    town.compute[1] = 0.4
    town.live(5)  # it is not said to be slow yet
    town.train(0.9)
    town.live(4)
    assert len(town.members) == 3
    town.live(20)
    assert [entry["worker"] for entry in town.records("worker_slow")] == [1]
    town.live(3)
    assert town.members == {0, 2}


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


def test_at_the_end_nobody_is_replaced():
    town = Town(3, replace_slow=True)
    town.compute[1] = 0.4
    town.live(5)
    town.post(e.FromWorker(0, m.Progress((m.StepReport(70, 3, 0.5, 8, 0.1, 0.1, 1, 1, True),), 70, 4)))
    town.live(60)
    assert town.records("worker_slow")
    assert len(town.records("worker_launched")) == 3
