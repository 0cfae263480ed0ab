"""Places of whoever can only be asked, again and again, which there are: a batch system, machines that are reached by ssh."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.retry import Background, retry
from elasticdl.master.core.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceReport, PlacesRefused, PlaceState

POLL_SECONDS = 2.0
CLOSE_SECONDS = 60.0
LONGEST_DELAY = 60.0
FIND_SECONDS = 60.0
FORGOTTEN = "whoever gave its place does not know it any more"
_log = logging.getLogger(__name__)


class Provider(Protocol):
    """Each request raises UnreachableError if there is no answer: then it is tried again, after a delay that grows."""

    async def list(self) -> Mapping[str, Place | PlaceLost]:
        """All places of this job by their ids, and for a while also those that have ended."""

    async def ask(self, avoid: AbstractSet[str]) -> str:
        """Ask for one more place, on none of these nodes if there is any other; returns its id.

        Raises:
            UserError: there will never be any, until somebody mends what this says.
        """

    async def end(self, place_ids: Sequence[str], *, at_once: bool) -> None:
        """End these places, or take them off the queue: SIGTERM, and SIGKILL after the time that is usual there, or SIGKILL at once.

        Nothing happens for one that has ended by itself.
        """


class PolledPlaces:
    """`elasticdl.places.base.Places` of a `Provider`."""

    def __init__(self, provider: Provider, report: PlaceReport, seconds: float = POLL_SECONDS) -> None:
        """``seconds``: between two requests for the list."""
        self._provider, self._report, self._seconds = provider, report, seconds
        self._places: dict[str, Place] = {}
        self._given_back: dict[str, bool] = {}  # by id: at once, or with some grace
        self._to_end: dict[str, bool] = {}  # those of them of which the provider is still to be told
        self._most = 0
        self._avoid: AbstractSet[str] = frozenset()
        self._refused = ""  # why nothing is had at present
        self._unsure = False  # a place was asked for without an answer yet, and no list since says whether it came
        self._changed, self._seen = asyncio.Event(), asyncio.Event()
        self._background = Background("places are watched", lambda why: report(LauncherFailed(why)))

    async def found(self) -> Sequence[Place]:
        backoff = Backoff(random.Random(), first=self._seconds, longest=LONGEST_DELAY)
        listing = await retry(self._provider.list, "list the places of the job", backoff, FIND_SECONDS)
        # What has ended is said to be lost by the next list, as its end may be news.
        self._places = {
            place_id: place if isinstance(place, Place) else Place(place_id, state=PlaceState.LOST)
            for place_id, place in listing.items()
        }
        self._most = len(self._wanted())  # until that is said
        self._background.start(self._keep())
        return tuple(self._places.values())

    def want(self, most: int, avoid: AbstractSet[str]) -> None:
        self._most, self._avoid = most, avoid
        self._drop_surplus()
        self._changed.set()

    def give_back(self, place_id: str, *, at_once: bool) -> None:
        place, told = self._places.get(place_id), self._given_back.get(place_id)
        if place and place.state is not PlaceState.LOST and (told is None or at_once > told):
            self._given_back[place_id] = self._to_end[place_id] = at_once
            self._changed.set()

    async def close(self, *, keep: bool = False) -> None:
        try:
            if not keep:
                await self._end_all()
        finally:
            await self._background.cancel()
            self._places.clear()

    async def _end_all(self) -> None:
        self.want(0, frozenset())
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._places or self._unsure:
                    for place_id in self._places:  # one that was being asked for comes later
                        self.give_back(place_id, at_once=False)
                    self._seen.clear()
                    await self._seen.wait()
        except TimeoutError:
            left = ", ".join(self._places) or "that were asked for"
            _log.error("places %s have not ended in %g s: leaving them behind", left, CLOSE_SECONDS)

    async def _keep(self) -> None:
        """Look what became of the places, end those that were given back, and ask for those that are missing, one after the other."""
        backoff = Backoff(random.Random(), first=self._seconds, longest=LONGEST_DELAY)
        while True:
            self._changed.clear()
            delay = self._seconds
            try:
                self._see(await self._provider.list())
                not_ended = None
                while (due := self._to_end and not not_ended) or len(self._wanted()) < self._most:
                    try:
                        await (self._end() if due else self._ask())
                    except UnreachableError as error:
                        if not due:
                            raise
                        not_ended = error  # which keeps nobody from having another place
                if not_ended:
                    raise not_ended
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

    async def _end(self) -> None:
        at_once = any(self._to_end.values())
        due = [place_id for place_id, now in self._to_end.items() if now == at_once]
        await self._provider.end(due, at_once=at_once)
        for place_id in due:
            if self._to_end[place_id] == at_once:  # nobody has become impatient meanwhile
                del self._to_end[place_id]

    async def _ask(self) -> None:
        """For one more; what is not answered is still missing."""
        self._unsure = True
        try:
            place_id = await self._provider.ask(self._avoid)
        except Exception as error:
            self._unsure = isinstance(error, UnreachableError)
            raise
        finally:
            self._seen.set()
        self._unsure = False
        self._change(Place(place_id, reason="it was asked for"))
        self._drop_surplus()

    def _see(self, listing: Mapping[str, Place | PlaceLost]) -> None:
        for place_id in {**self._places, **listing}:
            match listing.get(place_id, PlaceLost(place_id, ExitCause.NODE_LOST, -9, FORGOTTEN)):
                case PlaceLost() as end if place_id in self._places:
                    del self._places[place_id]
                    self._to_end.pop(place_id, None)
                    as_told = self._given_back.pop(place_id, None) is not None
                    self._report(PlaceLost(place_id, ExitCause.KILLED, -9, "as told") if as_told else end)
                case Place() as place if place != self._places.get(place_id):  # it may have come without an answer
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
        surplus = len(wanted) - self._most
        waiting = [each for each in wanted[::-1] if each.state is PlaceState.WAITING]
        for place in waiting[: max(0, surplus)]:
            self.give_back(place.id, at_once=True)
