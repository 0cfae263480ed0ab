"""The ports to whatever runs workers: `Places` provides places, a `Starter` runs workers in them, a `Launcher` does both.

A *place* is somewhere a worker can run: a slot of this machine, a pod, a job of a batch system. A place outlives its
workers: the next worker starts where the last one has ended. `elasticdl.places.launcher.PlaceLauncher` makes one
`Launcher` of any `Places` and any `Starter`, so a new kind of place is one class with the methods of `Places`.

All methods are called on one event loop, and all reports are made there, by calling the function that the factory was given.
Only methods with ``async`` may wait for anything. A failure is reported, never raised, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.events import (
    ExitCause,
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)

# The range of workers that the job has now: `elasticdl scale` changes it.
Limits = Callable[[], WorkerRange]
STACKS_SECONDS = 3.0


# ---- places ----


class PlaceState(StrEnum):
    WAITING = "waiting"  # asked for, and not there yet
    READY = "ready"  # a worker can be started in it, or runs in it
    ENDING = "ending"  # told to end, or not answering: its worker may still run, and no other is started in it
    LOST = "lost"  # gone; a `PlaceLost` says why


@dataclass(frozen=True, slots=True)
class Place:
    """One place, as it is at this moment."""

    id: str  # unique in the job; never used again once the place is lost
    node: str = ""  # of a cluster, where the place is; empty while nobody knows, and on this machine
    state: PlaceState = PlaceState.WAITING
    reason: str = ""  # for people: why it is WAITING or ENDING
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)  # what a worker in it must have set
    log: str = ""  # for people: the command that shows what a worker in it has printed, if there is one


@dataclass(frozen=True, slots=True)
class PlaceChanged:
    """This is new, or something of it has changed."""

    place: Place


@dataclass(frozen=True, slots=True)
class PlaceLost:
    """The place is gone, with all that ran in it: exactly one for each place, and the last that is reported of it.

    It also ends a place that was given back or that nobody wanted any more. The rest is what is said of a worker in it:
    ``code`` its exit code or minus a signal's number, ``detail`` one line for people, ``output`` the end of what it printed.
    """

    place_id: str
    cause: ExitCause
    code: int
    detail: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class PlacesRefused:
    """What is missing of the places that are wanted can't be had yet; ``reason``: why, for people; empty: it is asked for again."""

    reason: str


# `LauncherFailed`: no place can be had, now or later, until somebody mends something.
PlaceEvent = PlaceChanged | PlaceLost | PlacesRefused | LauncherFailed
PlaceReport = Callable[[PlaceEvent], None]


class Places(Protocol):
    """Provides places, and reports what becomes of them."""

    async def found(self) -> Sequence[Place]:
        """The places that an earlier master of this job has left, in whatever state; called once, first of all.

        From then on they are watched, and what becomes of them is reported after this call. Of one that is LOST, its `PlaceLost`
        is reported as well.

        Raises:
            UnreachableError: whoever provides the places can't be asked.
        """

    def want(self, most: int, avoid: AbstractSet[str]) -> None:
        """Have ``most`` places: WAITING and READY ones count, ENDING, LOST and given back ones do not.

        What is missing is asked for, and WAITING places above ``most`` are dropped, the newest first: of these nothing is reported
        any more but that they are lost, as KILLED. A READY place only goes by `give_back`. It may be said again, and nothing follows if
        nothing is missing. It need not be remembered: it is said again whenever a place is lost or given back, and when one
        begins or ceases to be ENDING.

        Args:
            most: With more the job can do nothing.
            avoid: Nodes on which a place that is asked for from now on should not be, if there is any other.
        """

    def give_back(self, place_id: str, *, at_once: bool) -> None:
        """End this place: nobody wants it any more. `PlaceLost` follows; nothing happens for one that is gone or unknown.

        What still runs in it has SIGTERM, and as many seconds as are usual there, or is killed ``at_once``.
        """

    async def close(self, *, keep: bool = False) -> None:
        """Give all places back and wait until they are gone, and reported; nothing is wanted afterwards.

        ``keep``: where places can outlive this master, leave them to another one, and report nothing more of them.
        """


PlacesFactory = Callable[[PlaceReport], Places]


# ---- workers in places ----


@dataclass(frozen=True, slots=True)
class PlaceEnding:
    """What starts workers in this place was told to end (SIGTERM), perhaps before whoever provides the place knows of it.

    It is reported before the end of the place's worker, which then carries the cause for which the place is lost.
    """

    place_id: str


# `WorkerPending`: a place is there, and what starts workers in it is not ready yet. `LauncherFailed`: no worker can be looked after.
StarterEvent = WorkerPending | WorkerPlaced | WorkerExited | StacksFound | PlaceEnding | LauncherFailed
StarterReport = Callable[[StarterEvent], None]


class Starter(Protocol):
    """Runs workers in READY places, at most one in each, and reports what becomes of them.

    For each worker started: `WorkerPlaced` once it runs, and in the end exactly one `WorkerExited`, after its process and its
    children are gone, so that the next worker can be started in its place.
    Every method may be called for a worker or place that is gone or unknown, and then does nothing.
    """

    async def found(self, places: Sequence[Place], remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        """The workers in these places, which an earlier master has left, each with its ``place``; called once, first of all.

        Waits a limited time for places that have not said yet what runs in them. In a place that says nothing in that time, those
        workers count as found that the earlier master remembered there. What became of them is reported when the place says so. Any
        other worker that shows itself later is reported as `WorkerPlaced`, and the launcher ends it.

        Args:
            remembered: The ids of workers, each with that of its place; empty for one whose place is not known.
        """

    def start(self, worker_id: int, place: Place) -> None:
        """Start this worker there, as soon as that is possible. No worker is in the place, and none is being started."""

    def end(self, worker_id: int, grace: float | None) -> None:
        """End a worker, and one that is being started.

        Args:
            grace: None for SIGTERM and no more; else SIGKILL for it and its children after so many seconds, 0 for at once.
        """

    def lost(self, place_id: str) -> None:
        """The place is gone: forget its worker. What is reported of it nevertheless is passed over."""

    def read_stacks(self, worker_id: int) -> None:
        """Find out where this worker stands: `StacksFound` within `STACKS_SECONDS`, unless it ends meanwhile."""

    async def close(self, *, keep: bool = False) -> None:
        """Kill all workers, and wait a limited time until they are gone and reported; nothing is started afterwards.

        ``keep``: where workers can outlive this master, leave them to another one, and report nothing more of them.
        """


StarterFactory = Callable[[StarterReport], Starter]


# ---- both together, as the master uses them ----

Report = Callable[[WorkerPending | WorkerPlaced | WorkerExited | StacksFound | LauncherFailed], None]


class Launcher(Protocol):
    """Runs workers and reports what becomes of them, on the event loop that called it.

    For each worker launched: `WorkerPending` while it can't run (again when the reason changes), `WorkerPlaced`
    once it runs, and in the end exactly one `WorkerExited`, after its process is gone and its place is free again.
    Every failure is reported that way, none is raised. No method waits for a worker except `close`.
    """

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        """The workers that an earlier master of this job has left, whatever became of them; called once, first of all.

        From then on they count as launched: what became of them is reported after the call. ``remembered``: as in `Starter.found`.
        """

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        """Start this worker, or keep it until there is a place; on other nodes than ``away_from``, if there are any.

        Raises:
            ValueError: this worker is there already.
        """

    def terminate(self, worker_id: int) -> None:
        """Ask the process to end (SIGTERM). Nothing happens for a worker that is gone or unknown."""

    def kill(self, worker_id: int) -> None:
        """End the process and its children at once. Nothing happens for a worker that is gone or unknown."""

    def read_stacks(self, worker_id: int) -> None:
        """Find out where this worker stands, and report it as `StacksFound` within `STACKS_SECONDS`; nothing comes for a
        worker that does not run, or is gone meanwhile."""

    async def close(self, *, keep: bool = False) -> None:
        """Kill what is left, wait until it is gone and give every place back. Nothing can be launched afterwards, and nothing is left
        to close.

        ``keep``: this master ends and has not decided that the job does: let workers be that another master could take over, and
        report nothing more of any.
        """
