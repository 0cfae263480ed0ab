"""Places and a starter without machines and processes: what happens to them, the test says."""

import itertools
import signal

from elasticdl.common.errors import UnreachableError
from elasticdl.master.core.events import ExitCause, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.worker_process import judge_exit

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


class FakeProvider:
    """What `PolledPlaces` asks, with room for so many places. Every third request is not answered."""

    def __init__(self, room):
        self._room = room
        self._places, self._asked, self._requests = {}, 0, 0

    async def list(self):
        self._answer()
        live = [place_id for place_id, end in self._places.items() if end is None]
        places = {
            place_id: Place(place_id, state=PlaceState.READY)
            if number < self._room
            else Place(place_id, reason="no room")
            for number, place_id in enumerate(live)
        }
        return {**self._places, **places}

    async def ask(self, avoid):
        self._answer()
        self._asked += 1
        self._places[str(self._asked)] = None
        return str(self._asked)

    async def end(self, place_ids, *, at_once):
        self._answer()
        for place_id in place_ids:
            self._end(place_id, "cancelled")

    def lose(self, place_id):
        self._end(place_id, "its node has failed")

    def _end(self, place_id, detail):
        self._places[place_id] = self._places[place_id] or PlaceLost(place_id, ExitCause.NODE_LOST, -9, detail)

    def _answer(self):
        self._requests += 1
        if self._requests % 3 == 0:
            raise UnreachableError("no answer")
