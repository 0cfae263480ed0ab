"""Who measures how a job scales: it hears of steps, and posts what they tell from a thread."""

from __future__ import annotations

import sys
import time

import pytest
from scaling_kit import report

from elasticdl.job.shared_values import Pace
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.shell.scaling_observer import FIRST_SECONDS, ScalingObserver
from elasticdl.master.state.learnt import Forgotten, Learnt
from elasticdl.master.state.speedup import Observation


class Bench:
    """An observer under a clock that is set."""

    def __init__(self, past=None, limits=None, **fields):
        self.posted, self.now = [], 100.0
        spec = JobSpec(global_batch_size=64, **fields)
        given = (lambda: limits or spec.num_workers, past or Learnt(), self.posted.append, lambda: self.now)
        self.observer = ScalingObserver(spec, *given)

    def train(self, *, workers, seconds, world=1, count=40):
        self.observer.recorded("world_formed", {"world": world, "members": list(range(workers))})
        self.now += FIRST_SECONDS
        for _ in range(count):
            self.observer.trained([report(seconds, world=world)], Pace(busy=0.8 * seconds))

    def post(self, count=1):
        """The latest of so many."""
        deadline = time.monotonic() + 20.0
        while len(self.posted) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(self.posted) == count
        return self.posted[-1]

    @property
    def observed(self):
        return [each.workers for each in self.posted[-1].observations]


@pytest.fixture
def bench():
    made = []

    def make(*given, **fields):
        made.append(Bench(*given, **fields))
        return made[-1]

    yield make
    for each in made:
        each.observer.close()


def test_what_the_steps_tell_is_posted_from_a_thread(bench):
    it = bench()
    it.train(workers=1, seconds=1.0)
    assert not it.posted, "one worker says nothing of more, and nobody asks"
    it.train(workers=2, seconds=0.6, world=2)
    event = it.post()
    assert (event.workers, it.observed) == (2, [1, 2])
    assert event.curve.at(2).speedup == pytest.approx(1 / 0.6, rel=0.05)


def test_the_curve_goes_as_far_as_the_job_was_scaled(bench):
    it = bench(limits=WorkerRange(minimum=1, maximum=64), num_workers="1-4")
    it.train(workers=10, seconds=0.1)
    assert max(point.workers for point in it.post().curve) == 20


def test_it_asks_seldom(bench):
    it = bench()
    it.train(workers=2, seconds=0.1, count=500)
    it.post(1)
    it.now += FIRST_SECONDS
    it.train(workers=2, seconds=0.1, count=1)
    it.post(2)
    it.train(workers=2, seconds=0.1, count=1)
    it.observer.recorded("scale_requested", {"workers": "1-8"})
    it.observer.trained([report(0.1)], Pace())
    it.post(3)


def test_what_was_recalled_counts_unless_it_is_of_another_batch(bench):
    it = bench(Learnt((Observation(1, 64, 1.0, 50, 0.1), Observation(3, 128, 0.5, 50, 0.1))))
    it.train(workers=2, seconds=0.6)
    it.post()
    assert it.observed == [1, 2]


@pytest.mark.parametrize(("batch", "seconds", "dropped"), [(64, 1.0, False), (128, 1.0, True), (64, 2.0, True)])
def test_what_was_recalled_is_dropped_as_a_whole_if_all_of_it_is_of_another_batch_or_time(
    bench, batch, seconds, dropped
):
    past = Learnt((Observation(1, batch, 1.0, 50, 0.1),), forgotten=(Forgotten(2, 1),))
    it = bench(past, scale_policy="efficiency")
    it.train(workers=1, seconds=seconds)  # one worker is enough for the policy
    event = it.post()
    assert (event.dropped, event.forgotten) == (dropped, () if dropped else past.forgotten)


def test_that_more_workers_were_slower_is_forgotten_after_a_while(bench):
    slower = (Observation(1, 64, 1.0, 50, 0.02), Observation(2, 64, 0.9, 50, 0.02), Observation(3, 64, 1.1, 50, 0.02))
    it = bench(Learnt(slower, forgotten=(Forgotten(2, 3),)), scale_policy="efficiency")
    it.now += 1000.0
    it.train(workers=1, seconds=0.8)
    event = it.post()
    assert not event.dropped
    assert it.observed == [1, 2]
    assert event.forgotten == (Forgotten(2, 3), Forgotten(3, 1))


def test_a_mistake_there_ends_it_and_not_the_job(bench, caplog, monkeypatch):
    it = bench()
    monkeypatch.setattr("elasticdl.master.rules.step_time.fit", lambda *given, **named: 1 / 0)
    it.train(workers=2, seconds=0.6)
    it.observer.close()
    assert "how the job scales is not looked at any more" in caplog.text
    assert not it.posted


def test_without_numpy_it_is_said_what_is_missing(bench, caplog, monkeypatch):
    it = bench()
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "elasticdl.master.rules.step_time", raising=False)
    it.train(workers=2, seconds=0.6)
    it.observer.close()
    (line,) = caplog.messages
    assert "numpy" in line
    assert "[worker]" in line
    assert not it.posted
