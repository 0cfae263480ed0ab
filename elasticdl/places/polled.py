"""Places of whoever can only be asked: a batch system, machines that are reached by ssh.

`PolledPlaces` does all of `Places` on three requests of a `Provider`, so a new kind of place is a class with these three.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.retry import retry
from elasticdl.master.state.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceReport, PlacesRefused, PlaceState

CLOSE_SECONDS = 60.0
LONGEST_DELAY = 60.0
FIND_SECONDS = 60.0
ENDED_AT_ONCE = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class End:
    """How a place has ended, as `PlaceLost` says it."""

    cause: ExitCause
    code: int
    detail: str


FORGOTTEN = End(ExitCause.NODE_LOST, -9, "whoever gave its place does not know it any more")
AS_TOLD = End(ExitCause.KILLED, -9, "as told")


class Provider(Protocol):
    """Each request raises UnreachableError if there is no answer: then it is tried again, after a delay that grows."""

    async def list(self) -> Mapping[str, Place | End]:
        """All places of this job by their ids, and for a while also those that have ended."""

    async def ask(self, avoid: AbstractSet[str]) -> str:
        """Ask for one more place, on none of these nodes if there is any other; returns its id.

        Raises:
            UserError: there will never be any, until somebody mends what this says.
        """

    async def end(self, place_id: str, *, at_once: bool) -> None:
        """End a place, or take it off the queue: SIGTERM, and SIGKILL after the time that is usual there, or SIGKILL at once."""


class PolledPlaces:
    """See `elasticdl.places.base.Places`."""

    def __init__(self, provider: Provider, report: PlaceReport, seconds: float) -> None:
        """``seconds``: between two requests for the list."""
        self._provider, self._report, self._seconds = provider, report, seconds
        self._places: dict[str, Place] = {}
        self._given_back: dict[str, bool] = {}  # by id: at once, or with some grace
        self._most = math.inf  # until that is said
        self._missing, self._avoid = 0, frozenset[str]()
        self._asking = 0  # 1 while a place is asked for
        self._refused = ""  # why nothing is had at present
        self._unsure = False  # a place was asked for without an answer, and the list since does not say whether it came
        self._turns = asyncio.Semaphore(ENDED_AT_ONCE)
        self._changed, self._seen = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def found(self) -> Sequence[Place]:
        backoff = Backoff(random.Random(), first=self._seconds, longest=LONGEST_DELAY)
        listing = await retry(self._provider.list, "list the places of the job", backoff, FIND_SECONDS)
        # What has ended is said to be lost by the next list, as its end may be news.
        self._places = {
            place_id: place if isinstance(place, Place) else Place(place_id, state=PlaceState.LOST)
            for place_id, place in listing.items()
        }
        self._start(self._keep())
        return tuple(self._places.values())

    def want(self, most: int, avoid: AbstractSet[str]) -> None:
        self._avoid, self._most = frozenset(avoid), most
        self._missing = max(0, most - len(self._wanted()) - self._asking)
        self._drop_surplus()
        self._changed.set()

    def give_back(self, place_id: str, *, at_once: bool) -> None:
        told_at_once, place = self._given_back.get(place_id), self._places.get(place_id)
        if place is None or place.state is PlaceState.LOST:
            return
        if told_at_once is None or (at_once and not told_at_once):
            self._given_back[place_id] = at_once
            self._start(self._end(place_id, at_once))

    async def close(self) -> None:
        self.want(0, frozenset())
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._places or self._asking or self._unsure:
                    for place_id in self._places:  # one that was being asked for comes later
                        self.give_back(place_id, at_once=False)
                    self._seen.clear()
                    await self._seen.wait()
        except TimeoutError:
            left = ", ".join(self._places) or "that were asked for"
            _log.error("places %s have not ended in %g s: leaving them behind", left, CLOSE_SECONDS)
        finally:
            await self.detach()

    async def detach(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._places.clear()

    async def _keep(self) -> None:
        """Look what became of the places, and ask for those that are missing, one after the other."""
        backoff = Backoff(random.Random(), first=self._seconds, longest=LONGEST_DELAY)
        while True:
            self._changed.clear()
            delay = self._seconds
            try:
                self._see(await self._provider.list())
                while self._missing:
                    await self._ask()
                backoff.reset()
                self._refuse("")
            except UserError as error:
                self._report(LauncherFailed(str(error)))
                delay = backoff.delay()
            except UnreachableError as error:
                delay = backoff.delay()
                self._changed.clear()
                self._refuse(str(error))
            timer = asyncio.get_running_loop().call_later(delay, self._changed.set)
            await self._changed.wait()
            timer.cancel()

    def _refuse(self, why: str) -> None:
        if why != self._refused:
            if why:
                _log.warning("%s", why)
            self._refused = why
            self._report(PlacesRefused(why))

    async def _ask(self) -> None:
        """For one more; what is not answered is still missing."""
        self._missing, self._asking = self._missing - 1, 1
        try:
            place_id = await self._provider.ask(self._avoid)
        except UnreachableError:
            self._missing, self._unsure = self._missing + 1, True
            raise
        finally:
            self._asking = 0
            self._seen.set()
        self._change(Place(place_id, reason="it was asked for"))
        self._drop_surplus()

    def _see(self, listing: Mapping[str, Place | End]) -> None:
        for place_id in [*self._places]:
            match listing.get(place_id, FORGOTTEN):
                case End() as end:
                    del self._places[place_id]
                    end = AS_TOLD if self._given_back.pop(place_id, None) is not None else end
                    self._report(PlaceLost(place_id, end.cause, end.code, end.detail))
                case place if place != self._places[place_id]:
                    self._change(place)
        for place_id, place in listing.items():
            if isinstance(place, Place) and place_id not in self._places:  # asked for, and the answer was lost
                self._missing = max(0, self._missing - 1)
                self._change(place)
        self._drop_surplus()
        self._unsure = False
        self._seen.set()

    def _change(self, place: Place) -> None:
        self._places[place.id] = place
        self._report(PlaceChanged(place))

    def _wanted(self) -> list[Place]:
        live = (PlaceState.WAITING, PlaceState.READY)
        return [each for each in self._places.values() if each.state in live and each.id not in self._given_back]

    def _drop_surplus(self) -> None:
        wanted = self._wanted()
        surplus = len(wanted) + self._asking - self._most
        for place in [each for each in wanted[::-1] if each.state is PlaceState.WAITING]:
            if surplus <= 0:
                break
            self.give_back(place.id, at_once=True)
            surplus -= 1

    async def _end(self, place_id: str, at_once: bool) -> None:
        async def end() -> None:
            async with self._turns:
                if place_id in self._places:  # else it has ended by itself
                    await self._provider.end(place_id, at_once=at_once)

        await retry(end, f"end place {place_id}", Backoff(random.Random(), longest=LONGEST_DELAY))
        self._changed.set()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):  # nobody else would hear of it
            _log.error("places are watched no longer", exc_info=error)
            self._report(LauncherFailed(f"places are watched no longer: {type(error).__name__}: {error}"))
