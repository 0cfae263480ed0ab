"""The one launcher: it pairs the workers that the master launches with the places that there are.

| what happens                                 | what follows                                                                 |
| -------------------------------------------- | ---------------------------------------------------------------------------- |
| a worker is launched                         | it starts in a READY place; if there is none, one more place is wanted, and  |
|                                              | the worker is pending for its reason                                         |
| a worker ends, and its place is still there  | the place stays, idle: the next worker starts in it at once                  |
| a place is idle for `IDLE_SECONDS`           | it is given back                                                             |
| a worker ends in a place that is ENDING      | its end is held back until the place is lost, so that it carries that cause  |
| a place is lost                              | the end of its worker is reported with the place's cause                     |
| a WAITING place is lost, and not as wanted   | so is the end of the worker that waits for it: whoever launches waits longer |
| a place is ENDING before its worker starts   | it is given back by force after `KILL_SECONDS`, as if its node was lost      |
| a worker does not start in its place         | after `Seconds.start` its place is given back by force, as if its node was lost |
| a worker that is killed does not end         | after `KILL_SECONDS` its place is given back by force; at once if it is ENDING |
| a worker shows itself that nobody launched   | it is killed                                                                 |
| another master begins                        | the places for which workers waited are kept until the workers are launched; |
|                                              | who was in a place that is lost since is found, and has ended with it        |

Everything but `find` and `close` is a function of what was called and reported. Timers are passed in.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    PlaceEvent,
    PlaceLost,
    PlacesFactory,
    PlacesRefused,
    PlaceState,
    Report,
    StarterEvent,
    StarterFactory,
)


class Timer(Protocol):
    def cancel(self) -> None: ...


@dataclass(slots=True)
class Spot:
    """A place and who is in it. After each change of its fields `PlaceLauncher._file` follows."""

    place: Place
    number: int  # of the places that were seen before
    worker: int | None = None  # waits for it while it is WAITING; runs in it, or is being started
    ends: bool = False  # its starter was told to end
    held: WorkerExited | None = None  # the end of its worker, until the place is lost
    over: bool = False  # given back, or lost: nobody may count on it
    timer: Timer | None = None  # gives it back

    def is_(self, state: PlaceState) -> bool:
        return self.place.state is state and not self.over

    @property
    def is_usable(self) -> bool:
        """A worker can be in it."""
        return self.is_(PlaceState.READY) and not self.ends

    @property
    def is_ending(self) -> bool:
        return self.is_(PlaceState.ENDING) or (self.is_(PlaceState.READY) and self.ends)


@dataclass(slots=True)
class Launched:
    """A worker that was launched, or found, and has not ended."""

    away_from: frozenset[str] = frozenset()
    places_before: int = 0  # places that were seen when it was launched
    spot: Spot | None = None  # for which it waits, or in which it was started
    placed: bool = False  # its process was started
    told: tuple[str, str] = ("", "")  # why it is pending, and where, as last reported

    def may_be_in(self, spot: Spot) -> bool:
        """A place on a node to avoid will do if it has come since: it was wanted elsewhere, and there is no other."""
        return spot.place.node not in self.away_from or spot.number >= self.places_before


# So long a place without a worker is kept: as long as a replacement may wait after a crash, and no longer, as others may wait for its
# GPUs.
IDLE_SECONDS = 30.0
KILL_SECONDS = 10.0
# What a worker's own exit code says as well, or better.
_OF_THE_PROCESS = (ExitCause.CLEAN, ExitCause.CRASHED, ExitCause.KILLED)

# Calls a function after so many seconds, on the event loop.
CallLater = Callable[[float, Callable[[], None]], Timer]


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long the launcher waits. ``kill`` None: for ever, where a worker that does not end can't be parted from its place.
    ``start``: for a worker's process to be started in a place that is READY; None: for ever, where nobody else has to answer."""

    idle: float = IDLE_SECONDS
    start: float | None = None
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
        self._workers: dict[int, Launched] = {}
        # Of these those that are not started, in the order in which they were launched. Of these again: who avoids nodes, and for
        # whom there is no place to wait for.
        self._pending: dict[int, Launched] = {}
        self._avoiding: dict[int, frozenset[str]] = {}
        self._without: dict[int, Launched] = {}
        self._spots: dict[str, Spot] = {}
        # Of these: READY; in which a worker can be, and none is; WAITING, and nobody waits for it.
        self._ready: dict[str, Spot] = {}
        self._free: dict[str, Spot] = {}
        self._unclaimed: dict[str, Spot] = {}
        self._seen = 0  # places
        self._wanted: tuple[int, frozenset[str]] | None = None
        # Places for which an earlier master's workers waited: they are launched anew, and would have to queue again.
        self._keeps_waiting = False
        self._refused = ""  # why nothing is had of the places that are missing
        self._inbox: deque[PlaceEvent | StarterEvent] = deque()
        self._busy = False
        self._closed = False

    # ---- the port ----

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        self._busy = True  # what is reported meanwhile is taken afterwards
        try:
            for place in await self._places.found():
                self._see(place)
            spots = self._spots
            self._keeps_waiting = bool(spots)
            found = await self._starter.found([spot.place for spot in spots.values()], remembered)
            workers = [self._adopt(spots[each.place], each) for each in found]
            for number, place_id in sorted(remembered.items()):
                if number not in self._workers and place_id in spots and spots[place_id].place.state is PlaceState.LOST:
                    workers.append(self._adopt(spots[place_id], FoundWorker(number, over=True)))
            return workers
        finally:
            self._busy = False
            self._call_later(0.0, self._work)

    def _adopt(self, spot: Spot, worker: FoundWorker) -> FoundWorker:
        """There may be two in a place: one that has ended, and the next."""
        self._workers[worker.worker_id] = Launched(spot=spot, placed=True)
        spot.worker = worker.worker_id
        self._file(spot)
        return replace(worker, node=worker.node or spot.place.node, place=spot.place.id)

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        if worker_id in self._workers:
            raise ValueError(f"worker {worker_id} is there already")
        worker = self._workers[worker_id] = Launched(frozenset(away_from), self._seen)
        self._pending[worker_id] = self._without[worker_id] = worker
        if away_from:
            self._avoiding[worker_id] = worker.away_from
        if self._keeps_waiting:
            self._call_later(self._seconds.idle, self._keep_no_longer)
        if self._closed:
            self._end(worker_id, 0.0)
        self._work()

    def terminate(self, worker_id: int) -> None:
        self._end(worker_id, None)

    def kill(self, worker_id: int) -> None:
        spot = self._spot_of(worker_id)
        self._end(worker_id, 0.0)
        if spot and self._seconds.kill is not None:
            seconds = 0.0 if spot.is_ending else self._seconds.kill  # its node may not answer
            self._call_later(seconds, partial(self._force, worker_id, spot))

    def read_stacks(self, worker_id: int) -> None:
        self._starter.read_stacks(worker_id)

    async def close(self, *, keep: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        for spot in self._spots.values():
            self._file(spot)
        if keep:
            self._report = lambda event: None
        for worker_id in () if keep else list(self._workers):
            self._end(worker_id, 0.0)
        await self._starter.close(keep=keep)
        await self._places.close(keep=keep)

    # ---- what the ports report ----

    def _take(self, report: PlaceEvent | StarterEvent) -> None:
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

    def _handle(self, report: PlaceEvent | StarterEvent) -> None:
        match report:
            case PlaceChanged(place):
                self._see(place)
            case PlaceEnding(place_id):
                if spot := self._spots.get(place_id):
                    spot.ends = True
                    self._file(spot)
            case PlaceLost():
                self._lose(report)
            case PlacesRefused(reason):
                self._refused = reason
            case WorkerPlaced(worker_id):
                if spot := self._spot_of(worker_id):
                    self._workers[worker_id].placed = True
                    self._report(replace(report, node=report.node or spot.place.node, place=spot.place.id))
                elif worker_id not in self._workers:
                    self._starter.end(worker_id, 0.0)
            case WorkerExited():
                self._exited(report)
            case WorkerPending(worker_id) | StacksFound(worker_id):
                if worker_id in self._workers:
                    self._report(report)
            case LauncherFailed():
                self._report(report)

    def _see(self, place: Place) -> None:
        spot = self._spots.get(place.id)
        if spot is None:
            spot = self._spots[place.id] = Spot(place, self._seen)
            self._seen += 1
        if PlaceState.ENDING in (place.state, spot.place.state):
            self._wanted = None  # another may be wanted for it, or none any more
        spot.place = place
        waits = spot.worker if spot.worker in self._pending else None
        if waits is not None and spot.is_(PlaceState.WAITING):
            self._tell(waits, place)
        elif waits is not None:
            self._part(waits)
            if spot.is_usable and self._pending[waits].may_be_in(spot) and not self._closed:
                self._start(waits, spot)
        self._file(spot)
        if spot.held and spot.is_usable:  # it stays after all
            self._forget(spot.held)
        if spot.worker is not None and spot.is_ending and self._seconds.kill is not None:
            self._call_later(self._seconds.kill, partial(self._is_cut_off, spot.worker, spot))

    def _lose(self, lost: PlaceLost) -> None:
        spot = self._spots.pop(lost.place_id, None)
        if spot is None:
            return
        self._wanted = None  # another may be wanted for it
        spot.over = True
        self._file(spot)
        self._starter.lost(lost.place_id)
        waits = spot.worker if spot.worker in self._pending else None
        if waits is not None and lost.cause is ExitCause.KILLED:  # as it was not wanted any more
            self._part(waits)
            return
        for worker_id in [number for number, each in self._workers.items() if each.spot is spot]:
            node = spot.place.node if worker_id == waits else ""
            exited = WorkerExited(worker_id, lost.cause, lost.code, lost.detail, lost.output, node)
            if (held := spot.held) and held.worker_id == worker_id:
                exited = replace(exited, code=held.code, output=held.output or lost.output)
                if lost.cause in _OF_THE_PROCESS:
                    exited = replace(exited, cause=held.cause, detail=held.detail)
            self._forget(exited)

    def _exited(self, exited: WorkerExited) -> None:
        spot = self._spot_of(exited.worker_id)
        if spot is None:
            return
        if exited.cause is ExitCause.CRASHED and (log := spot.place.log):
            exited = replace(exited, detail=f"{exited.detail}; its log: {log}")
        if spot.is_ending and spot.worker == exited.worker_id and not self._closed:
            spot.held = exited
        else:
            self._forget(exited)

    # ---- who is where ----

    def _spot_of(self, worker_id: int) -> Spot | None:
        """In which it was started."""
        worker = self._workers.get(worker_id)
        return worker.spot if worker and worker_id not in self._pending else None

    def _file(self, spot: Spot) -> None:
        """Put it in the books where it belongs; give it back after a while, if it is empty and costs something."""
        is_empty = spot.worker is None
        for book, belongs in (
            (self._ready, spot.is_(PlaceState.READY)),
            (self._free, spot.is_usable and is_empty),
            (self._unclaimed, spot.is_(PlaceState.WAITING) and is_empty),
        ):
            if belongs:
                book[spot.place.id] = spot
            else:
                book.pop(spot.place.id, None)
        if is_empty and (spot.is_usable or spot.is_ending) and not self._closed:
            spot.timer = spot.timer or self._call_later(self._seconds.idle, partial(self._idle_too_long, spot))
        elif spot.timer:
            spot.timer.cancel()
            spot.timer = None

    def _part(self, worker_id: int) -> None:
        """Of the place for which it waits."""
        worker = self._without[worker_id] = self._pending[worker_id]
        if spot := worker.spot:
            worker.spot = spot.worker = None
            self._file(spot)

    def _start(self, worker_id: int, spot: Spot) -> None:
        self._part(worker_id)
        worker = self._pending.pop(worker_id)
        for book in (self._without, self._avoiding):
            book.pop(worker_id, None)
        worker.spot, spot.worker = spot, worker_id
        self._file(spot)
        self._starter.start(worker_id, spot.place)
        if self._seconds.start is not None:
            self._call_later(self._seconds.start, partial(self._is_late, worker_id, spot))

    def _forget(self, exited: WorkerExited) -> None:
        worker_id = exited.worker_id
        spot = self._workers.pop(worker_id).spot
        for book in (self._pending, self._without, self._avoiding):
            book.pop(worker_id, None)
        if spot and spot.worker == worker_id:
            spot.worker = spot.held = None
            self._file(spot)
        self._report(exited)

    # ---- what follows ----

    def _settle(self) -> None:
        """Start pending workers where there is a place, and say how many places are wanted."""
        if self._closed:
            return
        while pair := self._next_pair():
            self._start(*pair)
        for spot in list(self._free.values()) if self._pending else ():  # nobody wants to be there
            self._give_back(spot)
        most = len(self._pending) + len(self._ready)
        if self._keeps_waiting:
            waiting = sum(spot.is_(PlaceState.WAITING) for spot in self._spots.values())
            most = len(self._ready) + max(waiting, len(self._pending))
        wanted = most, frozenset[str]().union(*self._avoiding.values())
        if self._wanted != wanted:
            self._wanted = wanted
            self._places.want(*wanted)
        while self._without and self._unclaimed:
            worker_id, spot = next(iter(self._without)), next(iter(self._unclaimed.values()))
            self._without.pop(worker_id).spot, spot.worker = spot, worker_id
            self._file(spot)
            self._tell(worker_id, spot.place)
        for worker_id in self._without if self._refused else ():
            self._tell(worker_id, Place("", reason=self._refused))

    def _next_pair(self) -> tuple[int, Spot] | None:
        """Who is to be started where."""
        for spot in self._free.values() if self._pending else ():
            for worker_id, worker in self._pending.items():
                if worker.may_be_in(spot):
                    return worker_id, spot
        return None

    def _keep_no_longer(self) -> None:
        self._keeps_waiting = False
        self._work()

    def _tell(self, worker_id: int, place: Place) -> None:
        """What a pending worker waits for, if that is new."""
        worker, why = self._workers[worker_id], (place.reason, place.node)
        if place.reason and worker.told != why:
            worker.told = why
            self._report(WorkerPending(worker_id, *why))

    def _end(self, worker_id: int, grace: float | None) -> None:
        if worker_id in self._pending:
            self._forget(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it had no place yet"))
        elif worker_id in self._workers:
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
        worker = self._workers.get(worker_id)
        if worker and spot.worker == worker_id and not (worker.placed or spot.held or spot.over):
            spot.held = WorkerExited(worker_id, ExitCause.NODE_LOST, -signal.SIGKILL, why)
            self._force(worker_id, spot)

    def _force(self, worker_id: int, spot: Spot) -> None:
        """The worker can't be had any other way."""
        if spot.worker == worker_id and not (spot.over or self._closed):
            self._give_back(spot, at_once=True)
            self._work()

    def _idle_too_long(self, spot: Spot) -> None:
        self._give_back(spot)
        self._work()

    def _give_back(self, spot: Spot, *, at_once: bool = False) -> None:
        spot.over = True
        self._wanted = None
        self._file(spot)
        self._places.give_back(spot.place.id, at_once=at_once)
