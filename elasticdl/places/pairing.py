"""Which worker is in which place, which are still without, and who goes where: the launcher's books. Nothing here acts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from elasticdl.master.state.events import WorkerExited
from elasticdl.places.base import Place, PlaceState


class Timer(Protocol):
    def cancel(self) -> None: ...


@dataclass(slots=True)
class Spot:
    """A place and what is in it."""

    place: Place
    number: int  # of the places that were seen before
    worker: int | None = None  # runs in it, or is being started
    used: bool = False  # has had a worker: whatever starts the next is warm
    awaited_by: int | None = None  # pending worker that is told what this WAITING place waits for
    meant_for: int | None = None  # it was READY next, and this worker waited for it
    was_left: bool = False  # by a worker that has ended by itself, or was told to
    ends: bool = False  # its starter was told to end
    held: WorkerExited | None = None  # the end of its worker, until the place is lost
    given_back: bool = False
    lost: bool = False
    timer: Timer | None = None  # gives it back

    def is_(self, state: PlaceState) -> bool:
        """Whether somebody may still count on it, and it is in this state."""
        return self.place.state is state and not self.given_back and not self.lost

    @property
    def is_usable(self) -> bool:
        """A worker can be in it."""
        return self.is_(PlaceState.READY) and not self.ends

    @property
    def is_ending(self) -> bool:
        return self.is_(PlaceState.ENDING) or (self.is_(PlaceState.READY) and self.ends)

    @property
    def is_empty(self) -> bool:
        """Nobody is in it, and it costs something."""
        return self.worker is None and (self.is_usable or self.is_ending)


@dataclass(slots=True)
class Launched:
    """A worker that was launched, or found, and has not ended."""

    away_from: frozenset[str] = frozenset()
    places_before: int = 0  # places that were seen when it was launched
    spot: Spot | None = None  # in which it was started
    awaits: Spot | None = None
    placed: bool = False  # its process was started
    told: tuple[str, str] = ("", "")  # why it is pending, and where, as last reported

    def may_be_in(self, spot: Spot) -> bool:
        """A place on a node to avoid will do if it has come since: it was wanted elsewhere, and there is no other."""
        return spot.place.node not in self.away_from or spot.number >= self.places_before


class Pairing:
    """After each change of a spot's fields it has to be filed."""

    def __init__(self) -> None:
        self.workers: dict[int, Launched] = {}
        # Of these those without a place, in the order in which they were launched. Of these again: who avoids nodes, and who
        # awaits none of the places that there are.
        self.pending: dict[int, Launched] = {}
        self._avoided: dict[int, frozenset[str]] = {}
        self.without_promise: dict[int, Launched] = {}
        self.spots: dict[str, Spot] = {}
        # Of these, which are READY. Of these again, in which a worker can be and none is: have had one, and never had.
        self._ready: dict[str, Spot] = {}
        self._idle: dict[str, Spot] = {}
        self._fresh: dict[str, Spot] = {}
        self._unawaited: dict[str, Spot] = {}
        self._lost: set[str] = set()
        self._seen = 0  # places

    @property
    def needed(self) -> int:
        """Places: all that there are and those that are missing."""
        return len(self.pending) + len(self._ready)

    @property
    def counted(self) -> int:
        """Places that there are, or for which somebody waits in a queue."""
        return len(self._ready) + sum(spot.is_(PlaceState.WAITING) for spot in self.spots.values())

    @property
    def avoided(self) -> frozenset[str]:
        """Nodes."""
        return frozenset().union(*self._avoided.values())

    @property
    def free(self) -> list[Spot]:
        """Those in which a worker can be, and none is."""
        return [*self._idle.values(), *self._fresh.values()]

    # ---- places ----

    def see(self, place: Place) -> Spot | None:
        """As it is now; None for one that is lost."""
        if place.id in self._lost:
            return None
        spot = self.spots.get(place.id)
        if spot is None:
            spot = self.spots[place.id] = Spot(place, self._seen)
            self._seen += 1
        spot.place = place
        if not spot.is_(PlaceState.WAITING):
            self._break_promise(spot)
        self.file(spot)
        return spot

    def lose(self, place_id: str) -> Spot | None:
        self._lost.add(place_id)
        spot = self.spots.pop(place_id, None)
        if spot:
            spot.lost = True
            self._break_promise(spot)
            self.file(spot)
        return spot

    def file(self, spot: Spot) -> None:
        free = spot.is_usable and spot.worker is None
        for book, belongs in (
            (self._ready, spot.is_(PlaceState.READY)),
            (self._idle, free and spot.used),
            (self._fresh, free and not spot.used),
            (self._unawaited, spot.is_(PlaceState.WAITING) and spot.awaited_by is None),
        ):
            if belongs:
                book[spot.place.id] = spot
            else:
                book.pop(spot.place.id, None)

    def _break_promise(self, spot: Spot) -> None:
        if spot.awaited_by is not None:
            worker = self.workers[spot.awaited_by]
            worker.awaits, spot.meant_for = None, spot.awaited_by
            self.without_promise[spot.awaited_by] = worker
            spot.awaited_by = None

    # ---- workers ----

    def launch(self, worker_id: int, away_from: Iterable[str]) -> None:
        worker = self.workers[worker_id] = Launched(frozenset(away_from), self._seen)
        self.pending[worker_id] = self.without_promise[worker_id] = worker
        if worker.away_from:
            self._avoided[worker_id] = worker.away_from

    def put(self, worker_id: int, spot: Spot) -> None:
        """The worker is started there, or was found there."""
        worker = self.workers.setdefault(worker_id, Launched())
        self._not_pending(worker_id, worker)
        worker.spot, spot.worker, spot.used = spot, worker_id, True
        self.file(spot)

    def others_in(self, spot: Spot) -> list[int]:
        """Of two workers that were found there the one that does not run."""
        return [number for number, each in self.workers.items() if each.spot is spot and number != spot.worker]

    def forget(self, worker_id: int) -> None:
        """The worker has ended."""
        worker = self.workers.pop(worker_id)
        self._not_pending(worker_id, worker)
        if worker.spot and worker.spot.worker == worker_id:  # of two that were found there the second may run
            worker.spot.worker = worker.spot.held = None
            self.file(worker.spot)

    def _not_pending(self, worker_id: int, worker: Launched) -> None:
        for book in (self.pending, self.without_promise, self._avoided):
            book.pop(worker_id, None)
        if spot := worker.awaits:
            worker.awaits = spot.awaited_by = None
            self.file(spot)

    # ---- who goes where ----

    def pairs(self) -> Iterator[tuple[int, Spot]]:
        """Who is to be put where, one after another; rather into a place that has had a worker, whose starter is warm."""
        while pair := self._next_pair():
            yield pair

    def _next_pair(self) -> tuple[int, Spot] | None:
        for spots in (self._idle, self._fresh) if self.pending else ():
            for spot in spots.values():
                meant = self.pending.get(spot.meant_for) if spot.meant_for is not None else None
                if spot.meant_for is not None and meant and meant.may_be_in(spot):
                    return spot.meant_for, spot
                for worker_id, worker in self.pending.items():
                    if worker.may_be_in(spot):
                        return worker_id, spot
        return None

    def promises(self) -> Iterator[tuple[int, Spot]]:
        """Pending workers and WAITING places, one for each, as far as there are any that are new."""
        while self.without_promise and self._unawaited:
            worker_id, worker = next(iter(self.without_promise.items()))
            spot = next(iter(self._unawaited.values()))
            worker.awaits, spot.awaited_by = spot, worker_id
            del self.without_promise[worker_id]
            self.file(spot)
            yield worker_id, spot
