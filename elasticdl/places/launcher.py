"""The one launcher: it pairs the workers that the master launches with the places that there are.

| what happens                                 | what follows                                                                 |
| -------------------------------------------- | ---------------------------------------------------------------------------- |
| a worker is launched                         | it starts in a READY place, in one that has had a worker if there is one;    |
|                                              | else one more place is wanted, and the worker is pending for its reason      |
| a worker ends, and its place is still there  | the place stays, idle: the next worker starts in it at once                  |
| a place is idle for `IDLE_SECONDS`           | it is given back; sooner if its worker was not cut short (`Seconds.left`)    |
| a worker ends in a place that is ENDING      | its end is held back until the place is lost, so that it carries that cause  |
| a place is lost                              | the end of its worker is reported with the place's cause                     |
| a WAITING place is lost, and not as wanted   | so is the end of the worker that waits for it: whoever launches waits longer |
| a place is ENDING before its worker starts   | it is given back by force after `KILL_SECONDS`, as if its node was lost      |
| a worker does not start in its place         | after `Seconds.start` its place is given back by force, as if its node was lost |
| a worker that is killed does not end         | after `KILL_SECONDS` its place is given back by force; at once if it is ENDING |
| a worker shows itself that nobody launched   | it is killed                                                                 |
| another master begins                        | the places for which workers waited are kept until the workers are launched; |
|                                              | who was in a place that is lost since is found, and has ended with it        |

Everything but `find`, `close` and `detach` is a function of what was called and reported. Timers are passed in.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from elasticdl.master.core.events import (
    ExitCause,
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)
from elasticdl.places.base import (
    Place,
    PlaceChanged,
    PlaceEnding,
    PlaceLost,
    PlacesFactory,
    PlacesRefused,
    PlaceState,
    Report,
    StarterFactory,
)

# Which worker is in which place, which are still without, and who goes where: the launcher's books. Nothing here acts.


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


# So long a place without a worker is kept: longer than it takes until a worker that is replaced at once has been launched.
IDLE_SECONDS = 30.0
KILL_SECONDS = 10.0
# What a worker's own exit code says as well, or better.
_OF_THE_PROCESS = (ExitCause.CLEAN, ExitCause.CRASHED, ExitCause.KILLED)

PortReport = (
    PlaceChanged
    | PlaceLost
    | PlacesRefused
    | LauncherFailed
    | WorkerPending
    | WorkerPlaced
    | WorkerExited
    | StacksFound
    | PlaceEnding
)


# Calls a function after so many seconds, on the event loop.
CallLater = Callable[[float, Callable[[], None]], Timer]


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long the launcher waits. ``kill`` None: for ever, where a worker that does not end can't be parted from its place.
    ``left``: as ``idle``, after a worker that has ended by itself or was told to: hardly ever another follows it at once.
    ``start``: for a worker's process to be started in a place that is READY; None: for ever, where nobody else has to answer."""

    idle: float = IDLE_SECONDS
    start: float | None = None
    left: float = IDLE_SECONDS
    kill: float | None = KILL_SECONDS


class PlaceLauncher:
    """See `elasticdl.places.base.Launcher` for the contract."""

    def __init__(
        self,
        make_places: PlacesFactory,
        make_starter: StarterFactory,
        report: Report,
        *,
        seconds: Seconds = Seconds(),
        call_later: CallLater | None = None,
    ) -> None:
        """
        Args:
            call_later: By default that of the running event loop.
        """
        self._places = make_places(self._take)
        self._starter = make_starter(self._take)
        self._report = report
        self._seconds = seconds
        self._call_later: CallLater = call_later or asyncio.get_running_loop().call_later
        self._known: set[int] = set()
        self._pairing = Pairing()
        self._wanted: tuple[int, frozenset[str]] | None = None
        # Places for which an earlier master's workers waited: they are launched anew, and would have to queue again.
        self._keeps_waiting = False
        self._sparing: Timer | None = None  # ends that
        self._refused = ""  # why nothing is had of the places that are missing
        self._inbox: deque[PortReport] = deque()
        self._busy = False
        self._closed = False

    # ---- the port ----

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        self._busy = True  # what is reported meanwhile is taken afterwards
        try:
            for place in await self._places.found():
                self._see(place)
            spots = self._pairing.spots
            self._keeps_waiting = bool(spots)
            found = await self._starter.found([spot.place for spot in spots.values()], remembered)
            workers = [self._adopt(spots[each.place_id], each.worker) for each in found]
            for number, place_id in sorted(remembered.items()):
                if number not in self._known and place_id in spots and spots[place_id].place.state is PlaceState.LOST:
                    workers.append(self._adopt(spots[place_id], FoundWorker(number, over=True)))
            return workers
        finally:
            self._busy = False
            self._call_later(0.0, self._work)

    def _adopt(self, spot: Spot, worker: FoundWorker) -> FoundWorker:
        self._known.add(worker.worker_id)
        self._pairing.put(worker.worker_id, spot)
        self._pairing.workers[worker.worker_id].placed = True
        self._watch(spot)
        doubtful = worker.doubtful or not spot.is_usable
        return replace(worker, node=worker.node or spot.place.node, doubtful=doubtful, place=spot.place.id)

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        if worker_id in self._known:
            raise ValueError(f"worker {worker_id} was launched before")
        self._known.add(worker_id)
        self._pairing.launch(worker_id, away_from)
        if self._keeps_waiting and self._sparing is None:
            self._sparing = self._call_later(self._seconds.idle, self._keep_no_longer)
        if self._closed:
            self._end(worker_id, 0.0)
        self._work()

    def terminate(self, worker_id: int) -> None:
        if (worker := self._pairing.workers.get(worker_id)) and worker.spot:
            worker.spot.was_left = True
        self._end(worker_id, None)

    def kill(self, worker_id: int) -> None:
        self._end(worker_id, 0.0)
        worker = self._pairing.workers.get(worker_id)
        if worker and worker.spot and self._seconds.kill is not None:
            seconds = 0.0 if worker.spot.is_ending else self._seconds.kill  # its node may not answer
            self._call_later(seconds, partial(self._force, worker_id, worker.spot))

    def read_stacks(self, worker_id: int) -> None:
        self._starter.read_stacks(worker_id)

    async def close(self) -> None:
        if not self._closed:
            self._shut()
            for worker_id in list(self._pairing.workers):
                self._end(worker_id, 0.0)
            await self._starter.close()
            await self._places.close()

    async def detach(self) -> None:
        if not self._closed:
            self._shut()
            self._report = lambda event: None
            await self._starter.detach()
            await self._places.detach()

    def _shut(self) -> None:
        self._closed = True
        for spot in self._pairing.spots.values():
            self._watch(spot)

    # ---- what the ports report ----

    def _take(self, report: PortReport) -> None:
        """A port may report while it is called: one thing is finished before the next is begun."""
        self._inbox.append(report)
        self._work()

    def _work(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            self._settle()
            while self._inbox:
                self._handle(self._inbox.popleft())
                self._settle()
        finally:
            self._busy = False

    def _handle(self, report: PortReport) -> None:
        workers = self._pairing.workers
        match report:
            case PlaceChanged(place):
                self._see(place)
            case PlaceEnding(place_id):
                if spot := self._pairing.spots.get(place_id):
                    spot.ends = True
                    self._pairing.file(spot)
                    self._watch(spot)
            case PlaceLost():
                self._lose(report)
            case PlacesRefused(reason):
                self._refused = reason
            case WorkerPlaced(worker_id):
                if worker_id not in workers:
                    self._starter.end(worker_id, 0.0)
                elif spot := workers[worker_id].spot:
                    workers[worker_id].placed = True
                    self._report(replace(report, node=report.node or spot.place.node, place=spot.place.id))
            case WorkerExited():
                self._exited(report)
            case WorkerPending(worker_id) | StacksFound(worker_id):
                if worker_id in workers:
                    self._report(report)
            case LauncherFailed():
                self._report(report)

    def _see(self, place: Place) -> None:
        before = self._pairing.spots.get(place.id)
        if place.state is PlaceState.ENDING or (before and before.place.state is PlaceState.ENDING):
            self._wanted = None  # another may be wanted for it, or none any more
        spot = self._pairing.see(place)
        if spot is None:
            return
        self._watch(spot)
        if spot.awaited_by is not None:
            self._tell(spot.awaited_by, spot.place)
        if spot.held and spot.is_usable:  # it stays after all
            self._forget(spot.held)
        if spot.worker is not None and spot.is_ending and self._seconds.kill is not None:
            self._call_later(self._seconds.kill, partial(self._is_cut_off, spot.worker, spot))

    def _lose(self, lost: PlaceLost) -> None:
        before = self._pairing.spots.get(lost.place_id)
        awaiting = before.awaited_by if before else None
        spot = self._pairing.lose(lost.place_id)
        if spot is None:
            return
        self._wanted = None  # another may be wanted for it
        self._watch(spot)
        self._starter.lost(lost.place_id)
        for worker_id in self._pairing.others_in(spot):
            self._forget(WorkerExited(worker_id, lost.cause, lost.code, lost.detail))
        cause, code, detail, output = lost.cause, lost.code, lost.detail, lost.output
        if spot.worker is None:
            if awaiting is not None and cause is not ExitCause.KILLED:
                self._forget(WorkerExited(awaiting, cause, code, detail, output, spot.place.node))
            return
        if spot.held:
            code, output = spot.held.code, spot.held.output or output
            if cause in _OF_THE_PROCESS:
                cause, detail = spot.held.cause, spot.held.detail
        self._forget(WorkerExited(spot.worker, cause, code, detail, output))

    def _exited(self, exited: WorkerExited) -> None:
        worker = self._pairing.workers.get(exited.worker_id)
        if worker is None or worker.spot is None:
            return
        worker.spot.was_left = worker.spot.was_left or exited.cause is ExitCause.CLEAN
        if exited.cause is ExitCause.CRASHED and (log := worker.spot.place.log):
            exited = replace(exited, detail=f"{exited.detail}; its log: {log}")
        if worker.spot.is_ending and worker.spot.worker == exited.worker_id and not self._closed:
            worker.spot.held = exited
        else:
            self._forget(exited)

    def _forget(self, exited: WorkerExited) -> None:
        spot = self._pairing.workers[exited.worker_id].spot
        self._pairing.forget(exited.worker_id)
        if spot:
            self._watch(spot)
        self._report(exited)

    # ---- what follows ----

    def _settle(self) -> None:
        """Start pending workers where there is a place, and say how many places are wanted."""
        pairing = self._pairing
        if self._closed:
            return
        for worker_id, spot in pairing.pairs():
            pairing.put(worker_id, spot)
            spot.was_left = False
            self._watch(spot)
            self._starter.start(worker_id, spot.place)
            if self._seconds.start is not None:
                self._call_later(self._seconds.start, partial(self._is_late, worker_id, spot))
        for spot in pairing.free if pairing.pending else ():  # nobody wants to be there
            self._give_back(spot)
        most = max(pairing.needed, pairing.counted) if self._keeps_waiting else pairing.needed
        if self._wanted != (most, pairing.avoided):
            self._wanted = most, pairing.avoided
            self._places.want(*self._wanted)
        for worker_id, spot in pairing.promises():
            self._tell(worker_id, spot.place)
        for worker_id in pairing.without_promise if self._refused else ():
            self._tell(worker_id, Place("", reason=self._refused))

    def _keep_no_longer(self) -> None:
        self._keeps_waiting = False
        self._work()

    def _tell(self, worker_id: int, place: Place) -> None:
        """What a pending worker waits for, if that is new."""
        worker, why = self._pairing.workers[worker_id], (place.reason, place.node)
        if place.reason and worker.told != why:
            worker.told = why
            self._report(WorkerPending(worker_id, *why))

    def _end(self, worker_id: int, grace: float | None) -> None:
        worker = self._pairing.workers.get(worker_id)
        if worker is None:
            return
        if worker.spot is None:
            self._forget(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it had no place yet"))
        else:
            self._starter.end(worker_id, grace)
        self._work()

    def _is_late(self, worker_id: int, spot: Spot) -> None:
        """Nobody in its place answers, or what workers are forked from hangs, unless it has begun by now."""
        self._give_up(worker_id, spot, f"it was not started within {self._seconds.start:g} s")

    def _is_cut_off(self, worker_id: int, spot: Spot) -> None:
        """A place that ends in order is gone by now. In any other nobody may ever tell what became of the worker."""
        if spot.is_ending:
            self._give_up(worker_id, spot, spot.place.reason or "its place ends")

    def _give_up(self, worker_id: int, spot: Spot, why: str) -> None:
        """A worker that has not begun can begin elsewhere sooner."""
        worker = self._pairing.workers.get(worker_id)
        if worker and spot.worker == worker_id and not (worker.placed or spot.held or spot.given_back):
            spot.held = WorkerExited(worker_id, ExitCause.NODE_LOST, -signal.SIGKILL, why)
            self._force(worker_id, spot)

    def _force(self, worker_id: int, spot: Spot) -> None:
        """The worker can't be had any other way."""
        if spot.worker == worker_id and not (spot.given_back or spot.lost or self._closed):
            self._give_back(spot, at_once=True)
            self._work()

    def _watch(self, spot: Spot) -> None:
        """Give it back after a while, if it is empty."""
        if spot.is_empty and not self._closed:
            seconds = self._seconds.left if spot.was_left else self._seconds.idle
            spot.timer = spot.timer or self._call_later(seconds, partial(self._idle_too_long, spot))
        elif spot.timer:
            spot.timer.cancel()
            spot.timer = None

    def _idle_too_long(self, spot: Spot) -> None:
        spot.timer = None
        self._give_back(spot)
        self._work()

    def _give_back(self, spot: Spot, *, at_once: bool = False) -> None:
        spot.given_back = True
        self._wanted = None
        self._pairing.file(spot)
        self._watch(spot)
        self._places.give_back(spot.place.id, at_once=at_once)
