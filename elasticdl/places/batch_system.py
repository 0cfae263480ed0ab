"""Places as jobs of a batch system, in each of which an agent runs (`elasticdl.places.agent`): what all such systems share.

An allocation can't grow, so each place is a job of its own; those that are pending cost nothing. What becomes of them is asked for
again and again, in one call for all. A system is known by how jobs are submitted, listed and ended: see `BatchSystem`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.state.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceReport, PlaceState

CLOSE_SECONDS = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job as the system lists it; ``cause``: of its end, if the place is LOST."""

    place: Place
    cause: ExitCause = ExitCause.KILLED


class BatchSystem(Protocol):
    """Every method raises `UnreachableError` if it may go better later."""

    async def submit(self) -> str:
        """A job more, in which an agent will run; returns its id.

        Raises:
            UserError: no job like this will ever be taken.
        """

    async def listed(self) -> Mapping[str, BatchJob]:
        """By id, in the order in which they were submitted. One that ended a while ago may be missing."""

    async def cancel(self, job: str, grace: float | None) -> None:
        """As `Places.give_back`."""


class BatchPlaces:
    """See `elasticdl.places.base.Places` for the contract."""

    def __init__(self, system: BatchSystem, report: PlaceReport, poll_seconds: float = 3.0) -> None:
        self._system = system
        self._report = report
        self._poll_seconds = poll_seconds
        self._places: dict[str, Place] = {}  # in the order in which they were submitted
        self._given_back: set[str] = set()
        self._most = self._submitting = 0
        self._failures = Backoff()
        self._refused = self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def found(self) -> Sequence[Place]:
        self._places = {job: each.place for job, each in (await self._system.listed()).items()}
        self._start(self._watch())
        return tuple(self._places.values())

    def want(self, fewest: int, most: int, avoid: AbstractSet[str]) -> None:
        self._most = most
        self._drop()
        while self._missing > 0 and not self._refused and not self._closed:
            self._submitting += 1
            self._start(self._submit())

    def give_back(self, place_id: str, grace: float | None) -> None:
        if place_id in self._places and place_id not in self._given_back:
            self._given_back.add(place_id)
            self._start(self._cancel(place_id, grace))

    async def close(self) -> None:
        self._closed = True
        for place_id in self._places:
            self.give_back(place_id, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._places or self._submitting:
                    self._changed.clear()
                    await self._changed.wait()
        await self.detach()

    async def detach(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _counted(self, *states: PlaceState) -> list[Place]:
        return [each for each in self._places.values() if each.state in states and each.id not in self._given_back]

    @property
    def _missing(self) -> int:
        return self._most - len(self._counted(PlaceState.WAITING, PlaceState.READY)) - self._submitting

    def _drop(self) -> None:
        for place in self._counted(PlaceState.WAITING)[::-1][: max(0, -self._missing)]:
            self.give_back(place.id, None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self) -> None:
        """Until the system has taken the job, or never will, or it is not wanted any more."""
        job = None
        while job is None and self._missing >= 0 and not self._closed:
            try:
                job = await self._system.submit()
                self._failures.reset()
            except UserError as error:
                self._refused = True
                self._report(LauncherFailed(str(error)))
                break
            except UnreachableError as error:
                _log.warning("no place can be asked for now: %s", error)
                await asyncio.sleep(self._failures.delay())
        self._submitting -= 1
        if job is not None:
            self._see(BatchJob(Place(job)))
        self._drop()  # fewer may be wanted than when it was begun
        if job is not None and self._closed:
            self.give_back(job, None)
        self._changed.set()

    async def _cancel(self, job: str, grace: float | None) -> None:
        while job in self._places:
            try:
                await self._system.cancel(job, grace)
                break
            except UnreachableError as error:
                _log.warning("a place can't be given back now: %s", error)
                await asyncio.sleep(self._poll_seconds)

    async def _watch(self) -> None:
        while True:
            before = list(self._places)  # one that is submitted meanwhile may not be listed
            try:
                listed = await self._system.listed()
            except UnreachableError as error:
                _log.warning("what became of the places can't be told now: %s", error)
            else:
                for job in before:
                    self._see(listed.get(job) or BatchJob(Place(job, state=PlaceState.LOST, reason="nobody knows how")))
            await asyncio.sleep(self._poll_seconds)

    def _see(self, job: BatchJob) -> None:
        place, before = job.place, self._places.get(job.place.id)
        given_back = place.id in self._given_back
        if place.state is PlaceState.LOST:
            del self._places[place.id]
            self._given_back.discard(place.id)
            cause = ExitCause.KILLED if given_back else job.cause
            self._report(PlaceLost(place.id, cause, -signal.SIGTERM, f"its batch job ended: {place.reason}"))
            self._changed.set()
        elif place != before:
            self._places[place.id] = place
            if not given_back:
                self._report(PlaceChanged(place))
