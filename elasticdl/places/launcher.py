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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from elasticdl.master.state.events import (
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
from elasticdl.places.pairing import Pairing, Spot, Timer

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
