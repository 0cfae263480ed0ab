"""A bench for places of any kind, and a provider of places whose answers the test chooses."""

import asyncio
import itertools
from contextlib import asynccontextmanager

from elasticdl.common.errors import UnreachableError
from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlacesRefused, PlaceState

DEADLINE = 60.0
NOWHERE = frozenset()


class PlacesBench:
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
    return opened(PlacesBench(make, lose))


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
