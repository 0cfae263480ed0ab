"""Places and a starter without machines and processes: what happens to them, the test says."""

import asyncio
import itertools
import signal
from contextlib import asynccontextmanager

from elasticdl.common.errors import UnreachableError
from elasticdl.master.core.events import ExitCause, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlacesRefused, PlaceState
from elasticdl.places.worker_process import judge_exit

DEADLINE = 60.0
NOWHERE = frozenset()
GONE = ExitCause.KILLED, -signal.SIGKILL


class FakePlaces:
    """Keeps the contract of `Places`. With ``room`` for so many it has them at once; else the test makes them ready."""

    def __init__(self, report=None, room=None):
        self.report, self.room = report, room
        self.ids = (f"place-{number}" for number in itertools.count())
        self.places = {}  # those that count for `want`, and the ENDING ones
        self.given_back = {}  # whether at once, by id
        self.asked = []  # what was asked of places and of the starter in them, in words
        self.left = ()

    def reporting_to(self, report):
        self.report = report
        return self

    async def found(self):
        self.places |= {place.id: place for place in self.left}
        return self.left

    def want(self, most, avoid):
        self.asked.append(" not on ".join([f"want {most}", *sorted(avoid)]))
        counted = [place for place in self.places.values() if place.state is not PlaceState.ENDING]
        waiting = [place for place in counted if place.state is PlaceState.WAITING]
        for place in waiting[::-1][: max(0, len(counted) - most)]:
            self.lose(place.id, "nobody wants it any more")
        new = [next(self.ids) for _ in range(most - len(counted))]
        self.places |= {place_id: Place(place_id) for place_id in new}
        self.fill()
        for place_id in [each for each in self.in_state(PlaceState.WAITING) if each in new]:
            self.change(place_id, reason="full" if self.room else "")

    def give_back(self, place_id, *, at_once):
        if place_id in self.places:
            self.asked.append(f"give back {place_id}{' at once' * at_once}")
            self.given_back[place_id] = at_once
            del self.places[place_id]
            if self.room is not None:
                self.lose(place_id)
                self.fill()

    async def close(self, *, keep=False):
        self.room = 0
        for place_id in [] if keep else [*self.places, *self.given_back]:
            self.lose(place_id)

    # ---- what the test has happen ----

    def fill(self):
        free = (self.room or 0) - len(self.in_state(PlaceState.READY))
        for place_id in self.in_state(PlaceState.WAITING)[: max(0, free)]:
            self.change(place_id, PlaceState.READY)

    def in_state(self, state):
        return [place.id for place in self.places.values() if place.state is state]

    def change(self, place_id, state=PlaceState.WAITING, node="", reason="", log=""):
        if place_id in self.given_back:  # of which nothing is told but its end
            return
        place = self.places[place_id] = Place(place_id, node, state=state, reason=reason, log=log)
        self.report(PlaceChanged(place))

    def lose(self, place_id, detail="gone", cause=GONE[0], code=GONE[1]):
        if place_id in self.places or place_id in self.given_back:
            self.places.pop(place_id, None)
            self.given_back.pop(place_id, None)
            self.report(PlaceLost(place_id, cause, code, detail))


class FakeStarter:
    """Keeps the contract of `Starter`, and checks what it is asked for. With ``places`` it starts and ends workers at once."""

    def __init__(self, places, at_once=True):
        self.places, self.at_once = places, at_once
        self.started = {}  # worker id: place id
        self.left = ()

    def reporting_to(self, report):
        self.report = report
        return self

    async def found(self, places, remembered):
        self.started |= {each.worker_id: each.place for each in self.left}
        return self.left

    def start(self, worker_id, place):
        now = self.places.places.get(place.id)
        assert now == place, f"{place} is not there"
        assert now.state is PlaceState.READY, now
        assert place.id not in self.started.values(), f"there is a worker in {place}"
        assert worker_id not in self.started, f"worker {worker_id} is in {self.started[worker_id]}"
        self.started[worker_id] = place.id
        self.places.asked.append(f"start {worker_id} in {place.id}")
        if self.at_once:
            self.placed(worker_id)

    def end(self, worker_id, grace):
        self.places.asked.append(f"{'terminate' if grace is None else 'kill'} {worker_id}")
        if self.at_once:
            self.exit(worker_id, -(signal.SIGTERM if grace is None else signal.SIGKILL))

    def lost(self, place_id):
        self.started = {worker: place for worker, place in self.started.items() if place != place_id}

    def read_stacks(self, worker_id):
        if worker_id in self.started:
            self.report(StacksFound(worker_id, ""))

    async def close(self, *, keep=False):
        for worker_id in [] if keep else list(self.started):
            self.exit(worker_id, GONE[1])

    # ---- what the test has happen ----

    def placed(self, worker_id):
        self.report(WorkerPlaced(worker_id, "host", 1000 + worker_id))

    def exit(self, worker_id, code):
        if self.started.pop(worker_id, None):
            self.report(WorkerExited(worker_id, judge_exit(code)[0], code))


class Bench:
    """Places of which two can be READY at a time, and what was reported of them."""

    def __init__(self, make, lose=None):
        """``lose``: makes a place vanish, as somebody else would; None where nobody can."""
        self.reports = asyncio.Queue()
        # That a request was refused is told or not, as it happens.
        self.places = make(lambda report: isinstance(report, PlacesRefused) or self.reports.put_nowait(report))
        self.lose = lose
        # Places that there are; what was told of those that are gone; ids of all.
        self.now, self.lost, self.ids = {}, {}, []

    async def until(self, condition):
        """Take reports until this is so."""
        while not condition(self):
            self.take(await asyncio.wait_for(self.reports.get(), DEADLINE))

    def take(self, report):
        match report:
            case PlaceChanged(place):
                assert place.id not in self.lost, "a place that was lost has changed"
                assert place.state is not PlaceState.LOST
                self.ids += [] if place.id in self.ids else [place.id]
                self.now[place.id] = place
            case PlaceLost(place_id):
                assert place_id not in self.lost, "a place was lost twice"
                self.lost[place_id] = report
                self.now.pop(place_id, None)
            case _:
                raise AssertionError(report)

    def nothing_more(self):
        return self.reports.empty()

    def states(self):
        return sorted(place.state for place in self.now.values())

    def ready(self):
        return [place.id for place in self.now.values() if place.state is PlaceState.READY]

    def waiting(self):
        return [place.id for place in self.now.values() if place.state is PlaceState.WAITING]

    async def become_ready(self, count):
        self.places.want(count, NOWHERE)
        await self.until(lambda bench: len(bench.ready()) == count)

    async def has(self, *, ready, waiting=0):
        states = sorted([PlaceState.READY] * ready + [PlaceState.WAITING] * waiting)
        await self.until(lambda bench: bench.states() == states)


@asynccontextmanager
async def opened(bench):
    """Of its places none is left."""
    assert tuple(await bench.places.found()) == ()
    try:
        yield bench
    finally:
        await bench.places.close()
    while not bench.nothing_more():
        bench.take(bench.reports.get_nowait())
    assert bench.now == {}, "places are left after `close`"


def bench_of(make, lose=None):
    return opened(Bench(make, lose))


class FakeProvider:
    """What `PolledPlaces` asks, with room for so many places. Of each request ``answers`` says what becomes of it."""

    def __init__(self, room, answers=()):
        self._room, self._answers = room, itertools.chain(answers, itertools.cycle(["fine", "fine", "is not heard"]))
        self.places = {}  # None for those that live

    async def list(self):
        async with self._answered():
            places = {
                place_id: Place(place_id, state=PlaceState.READY)
                if number < self._room
                else Place(place_id, reason="no room")
                for number, place_id in enumerate(self.live())
            }
            return {**self.places, **places}

    async def ask(self, avoid):
        async with self._answered():
            place_id = str(len(self.places))
            self.places[place_id] = None
            return place_id

    async def end(self, place_ids, *, at_once):
        async with self._answered():
            for place_id in place_ids:
                self.lose(place_id, "cancelled")

    def live(self):
        return [place_id for place_id, end in self.places.items() if end is None]

    def lose(self, place_id, detail="its node has failed"):
        self.places[place_id] = self.places[place_id] or PlaceLost(place_id, ExitCause.NODE_LOST, -9, detail)

    @asynccontextmanager
    async def _answered(self):
        answer = next(self._answers)
        await asyncio.sleep(0)  # who asks may change their mind meanwhile
        if answer == "is not heard":
            raise UnreachableError("no answer")
        yield
        await asyncio.sleep(0)
        if answer == "is done without an answer":
            raise UnreachableError("no answer")
