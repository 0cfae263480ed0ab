"""A launcher over places, a starter and a clock that do what a test says."""

import heapq
import itertools

import pytest

from elasticdl.master.core.events import WorkerPlaced
from elasticdl.places.base import PlaceState
from elasticdl.places.launcher import PlaceLauncher
from tests.contract.places_kit import FakePlaces, FakeStarter

READY, WAITING, ENDING = PlaceState.READY, PlaceState.WAITING, PlaceState.ENDING


class Clock:
    """Time passes when the test says so."""

    def __init__(self):
        self.now, self.numbers, self.timers = 0.0, itertools.count(), []

    def call_later(self, seconds, function):
        timer = Timer(function)
        heapq.heappush(self.timers, (self.now + seconds, next(self.numbers), timer))
        return timer

    def advance(self, seconds):
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self.timers)
            timer.run()
        self.now = end


class Timer:
    def __init__(self, function):
        self.run = function

    def cancel(self):
        self.run = lambda: None


class Scene:
    def __init__(self, *, at_once=True, **options):
        self.clock, self.reports, self.places = Clock(), [], FakePlaces()
        self.starter = FakeStarter(self.places, at_once)
        ports = self.places.reporting_to, self.starter.reporting_to
        self.launcher = PlaceLauncher(*ports, self.reports.append, call_later=self.clock.call_later, **options)

    def launch(self, *ids, away_from=()):
        for worker_id in ids:
            now(self.launcher.launch(worker_id, away_from))

    def ready(self, *numbers, node="n1"):
        for number in numbers:
            self.places.change(f"place-{number}", READY, node)

    def placed(self, count, **more):
        """So many workers, each in its place."""
        self.launch(*range(count))
        self.ready(*range(count), **more)
        self.reports.clear()
        return self

    def new(self):
        """What was reported since."""
        new, self.reports[:] = list(self.reports), []
        return new


def now(coroutine):
    """The result of one that has nothing to wait for."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def placed(worker_id, place=0, node="n1"):
    return WorkerPlaced(worker_id, "host", 1000 + worker_id, node, f"place-{place}")
