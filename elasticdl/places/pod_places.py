"""Places on a Kubernetes cluster: each is a pod, in which an agent (`elasticdl.places.agent`) runs workers.

`PodPlaces` keeps the contract of `elasticdl.places.base.Places`. Where a cluster makes it mean something of its own:

- A place is READY when its pod's container runs. Until then it is WAITING, for whatever reason.
- `give_back` deletes the pod with its grace period, or with a second's: what runs is still ended by its node, and the
  device is free before the next one gets it. Only when a pod is still there after `FORCE_SECONDS`, because its node is lost,
  it is taken off the books by force; whether the process has ended then nobody can tell.
- A pod is asked for until the cluster takes it. Pods are asked for one after another, in one task. What the cluster takes
  only later (a quota) is a reason to wait, for all pods behind one back-off; what it will never take is `LauncherFailed`.
- A pod that has a node and does not run says why by its containers. What it does not say (a volume that is not there) has its
  node told in an event: of pods that wait for half a minute this is asked.
- Of the pods that are over the newest are left for their logs, and go with the job; the others are removed a while later.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError
from elasticdl.common.retry import Background, retry, until
from elasticdl.kube.client import CONFLICT, INVALID, ApiError, NotThereError, Watch
from elasticdl.kube.manifests import is_deleted, is_over
from elasticdl.kube.names import without_name
from elasticdl.master.core.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceReport, PlaceState
from elasticdl.places.judge import Ended, Waiting, doubt, judge_end, judge_pod, log_of
from elasticdl.places.worker_pods import Manifest, WorkerPodApi, WorkerPods, index_of, is_wrong, number_of

KEPT = 3  # pods that are over, the newest, for their logs
# Of those that delete, read and remove pods.
REQUESTS_AT_ONCE = 8
# Of pods that do not start; they mostly wait for the same.
EXPLAINED_AT_ONCE = 5
KILL_GRACE = 1
FORCE_SECONDS = 15.0
_log = logging.getLogger(__name__)
T = TypeVar("T")
Object = Mapping[str, Any]
Reports = list[PlaceChanged | PlaceLost]


# What is known of each pod, and what of it is news: every method of the ledger returns the reports that follow.
#
# Whatever comes twice, late or out of order changes nothing: reports are made from what a pod is, and its loss is
# reported once. Owned by the event loop.


@dataclass(slots=True)
class Entry:
    """One pod that is not known to be gone."""

    number: int
    index: int
    place: Place  # as last reported
    pod: Object | None = None  # as last seen
    told: bool = False  # by us, to end
    waits: Waiting | None = None  # as last reported
    warning: str = ""  # why it can't be started, as its node said last

    @property
    def leaves(self) -> bool:
        """Whether it is being deleted, or is about to be."""
        return self.told or bool(self.pod and is_deleted(self.pod))


class Ledger:
    def __init__(self, name: Callable[[int], str], first_number: int = 0) -> None:
        """``name``: that of a pod by its number, which is its place's id. ``first_number``: that no pod has had before."""
        self._name = name
        self._entries: dict[int, Entry] = {}
        self._ended: set[int] = set()
        self._highest = first_number - 1  # of all numbers
        self.ever_placed = False
        self.left: list[int] = []  # whose end is reported, and whose pods are still there, the oldest first

    def __len__(self) -> int:
        """As many are not known to be gone."""
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        """Whether a pod was asked for or adopted and is not known to be gone."""
        return number in self._entries

    @property
    def numbers(self) -> list[int]:
        return sorted(self._entries)

    @property
    def image_trouble(self) -> Waiting | None:
        """Why no pod has ever run, if it is because of the image."""
        if self.ever_placed:  # asked after every change of a pod, of which there may be thousands
            return None
        waits = [entry.waits for entry in self._entries.values() if entry.waits and entry.waits.image]
        return max(waits, key=lambda wait: wait.lasting, default=None)

    def known(self, number: int) -> bool:
        return number in self._entries or number in self._ended

    def wanted(self, state: PlaceState) -> list[int]:
        """Those in this state of which somebody may still want something."""
        return [number for number, each in self._entries.items() if each.place.state is state and not each.told]

    def runs(self) -> bool:
        """Whether there is any that may end by itself."""
        states = (PlaceState.READY, PlaceState.ENDING)
        return any(entry.place.state in states for entry in self._entries.values())

    def ask(self, count: int) -> list[Entry]:
        """Begin so many entries. Each index is the first that is free, or whose pod is about to leave it."""
        taken = {entry.index for entry in self._entries.values() if not entry.leaves}
        free = itertools.islice((index for index in itertools.count() if index not in taken), count)
        begun = [
            Entry(number, index, Place(self._name(number))) for number, index in enumerate(free, self._highest + 1)
        ]
        self._entries |= {entry.number: entry for entry in begun}
        self._highest += count
        return begun

    def adopt(self, pod: Object) -> Place:
        """Begin an entry for a pod that was asked for by somebody else, a master before this one."""
        number = number_of(pod)
        entry = self._entries[number] = Entry(number, index_of(pod), Place(self._name(number)))
        self._highest = max(self._highest, number)
        if isinstance(judge_pod(pod, told=False), Ended):  # which is reported when it is seen again
            entry.place = replace(entry.place, state=PlaceState.LOST, node=str(pod["spec"].get("nodeName") or ""))
        else:
            self.seen(pod)
        entry.pod, entry.told = pod, is_deleted(pod)
        return entry.place

    def tell(self, number: int) -> bool:
        """Note that we have it ended; whether there is anything to end."""
        if entry := self._entries.get(number):
            entry.told = True
        return entry is not None

    # ---- what was seen ----

    def refused(self, number: int, reason: str) -> Reports:
        """The cluster does not take the pod, now; it is tried again."""
        entry = self._entries.get(number)
        return self._wait(entry, Waiting(reason)) if entry else []

    def never(self, number: int, cause: ExitCause, detail: str) -> Reports:
        """There is no pod and will be none."""
        code = 1 if cause is ExitCause.CRASHED else -9
        entry = self._entries.get(number)
        return self._end(entry, Ended(cause, code, detail)) if entry else []

    def seen(self, pod: Object) -> Reports:
        number = number_of(pod)
        entry = self._entries.get(number)
        if entry is None:
            return []
        entry.pod = pod
        verdict = judge_pod(pod, told=entry.told, warning=entry.warning)
        if isinstance(verdict, Ended):
            self.left.append(number)
            return self._end(entry, verdict)
        why = doubt(pod)
        if verdict is None:
            entry.waits, self.ever_placed = None, True
            state, node = PlaceState.ENDING if why else PlaceState.READY, str(pod["spec"].get("nodeName") or "")
            return self._change(entry, replace(entry.place, node=node, state=state, reason=why, log=log_of(pod)))
        if why:  # what it still waits for does not matter
            return (
                []
                if entry.told
                else self._change(entry, replace(entry.place, state=PlaceState.ENDING, reason=why, node=verdict.node))
            )
        return self._wait(entry, verdict)

    def gone(self, number: int, pod: Object | None = None) -> Reports:
        """The pod's object is not there any more; ``pod`` is the last of it."""
        entry = self._entries.get(number)
        if entry is None:
            return []
        entry.pod = pod or entry.pod
        if entry.pod is None:
            cause = ExitCause.KILLED if entry.told else ExitCause.DELETED
            return self._end(entry, Ended(cause, -9, "its pod is not there any more"))
        return self._end(entry, judge_end(entry.pod, told=entry.told, gone=True))

    def created(self, pod: Object) -> Reports:
        """The answer to our request for it, which what was seen since may have overtaken."""
        entry = self._entries.get(number_of(pod))
        return self.seen(entry.pod or pod) if entry else []

    def missing(self, pods: Iterable[Object]) -> list[int]:
        """Those that were seen and are not among these; they may have come after the list was made."""
        there = {number_of(pod) for pod in pods}
        return [number for number, each in self._entries.items() if each.pod and number not in there]

    def starting(self) -> dict[int, str]:
        """The pods that have a node, do not run yet, and say nothing of why: their uids by number."""
        found = {}
        for number in self.wanted(PlaceState.WAITING):
            pod = self._entries[number].pod
            verdict = judge_pod(pod, told=False) if pod else None
            if pod and isinstance(verdict, Waiting) and verdict.node and verdict.on_its_way:
                found[number] = str(pod["metadata"].get("uid"))
        return found

    def warned(self, number: int, warning: str) -> Reports:
        """Its node says why the pod can't be started."""
        entry = self._entries.get(number)
        if entry is None or entry.pod is None:
            return []
        entry.warning = warning
        return self.seen(entry.pod)

    def _end(self, entry: Entry, verdict: Ended) -> Reports:
        del self._entries[entry.number]
        self._ended.add(entry.number)
        node = str((entry.pod or {}).get("spec", {}).get("nodeName") or "")
        # Of one that never ran nobody may know yet which node has refused it.
        told = [] if entry.place.node == node else self._change(entry, replace(entry.place, node=node))
        return [*told, PlaceLost(entry.place.id, verdict.cause, verdict.code, verdict.detail, verdict.output)]

    def _change(self, entry: Entry, place: Place) -> Reports:
        if place == entry.place or entry.place.state is PlaceState.LOST:
            return []
        entry.place = place
        return [PlaceChanged(place)]

    def _wait(self, entry: Entry, waiting: Waiting) -> Reports:
        if entry.place.state is not PlaceState.WAITING or waiting == entry.waits:
            return []
        if entry.waits is None and waiting.on_its_way:  # reported only to replace an older reason
            return []
        # The reason why an image can't be pulled is given once; then it is only said that it is tried again.
        if entry.waits and entry.waits.image and waiting.image and not waiting.lasting:
            return []
        entry.waits = waiting
        return self._change(entry, replace(entry.place, reason=waiting.reason, node=waiting.node))


@dataclass(frozen=True, slots=True)
class PodTimeouts:
    """Times in seconds."""

    image: float = 300.0  # for an image to be pulled, while no pod has ever run
    explain: float = 30.0  # for a pod that has a node to run, before its node is asked why it does not
    force: float = FORCE_SECONDS  # for a node to end a pod that is killed
    leave: float = 10.0  # for agents that were told to leave: the logs of their pods stay then
    close: float = 60.0
    start: float = 60.0  # for the first list
    first_retry: float = 0.5
    over: float = 60.0  # for whoever reads the log of a pod that is over and older than the newest
    longest_retry: float = 8.0  # so long may a job be blind after the API server is back


class PodPlaces:
    def __init__(
        self,
        api: WorkerPodApi,
        pods: WorkerPods,
        report: PlaceReport,
        timeouts: PodTimeouts,
        rng: random.Random,
        first_number: int = 0,
    ) -> None:
        """``first_number``: of the pods that are asked for, if none of those that are there has a higher one."""
        self._api = api
        self._pods = pods
        self._report = report
        self._timeouts = timeouts
        self._backoff = partial(Backoff, rng, timeouts.first_retry, timeouts.longest_retry)
        self._ledger = Ledger(pods.name, first_number)
        self._changed = asyncio.Event()  # what the ledger says
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="kubernetes")
        self._background = Background("pods are looked after", lambda why: report(LauncherFailed(why)))
        self._parting: set[asyncio.Task[Any]] = set()  # of these: pods are deleted that only other containers keep
        loop = asyncio.get_running_loop()

        def here(callback: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is over
                loop.call_soon_threadsafe(callback, *arguments)

        listed, changed = lambda pods: here(self.pods_listed, pods), lambda *seen: here(self.pod_changed, *seen)
        self._watch = Watch(api.pods, listed, changed, self._backoff())
        self._wanted: tuple[int, AbstractSet[str]] = 0, frozenset()
        self._asking_soon: asyncio.Handle | None = None
        self._orders: dict[int, Manifest] = {}  # the pods that are yet to be made, in this order
        self._doubtful: set[int] = set()  # of these: a request had no answer, so the pod may be there
        self._asking: int | None = None  # for which of these a request is under way
        self._creator: asyncio.Task[None] | None = None  # while there are orders
        self._image_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ---- the port ----

    async def found(self) -> tuple[Place, ...]:
        ask = partial(self._call, self._api.pods.list)
        listing = await self._background.start(
            retry(ask, "list the workers' pods", self._backoff(), self._timeouts.start)
        )
        found = tuple(self._ledger.adopt(pod) for pod in listing["items"] if self._pods.owns(pod))
        # What becomes of them is reported only after the caller knows that they were found.
        asyncio.get_running_loop().call_soon(self._begin)
        return found

    def want(self, most: int, avoid: AbstractSet[str]) -> None:
        """Thousands of workers are launched one by one: what was wanted last is done once."""
        self._wanted = most, avoid
        if self._asking_soon is None and not self._closed:
            self._asking_soon = asyncio.get_running_loop().call_soon(self._ask_for_places)

    def give_back(self, place_id: str, *, at_once: bool) -> None:
        number = self._number(place_id)
        if number is not None:
            self._end(number, KILL_GRACE if at_once else None)

    async def close(self, *, keep: bool = False) -> None:
        if not self._closed and not keep:
            self._closed = True  # first, as the pods that go are not to be replaced
            await self._end_all()
        self._closed = True
        for timer in (self._image_timer, self._asking_soon):
            if timer:
                timer.cancel()
        self._watch.stop()
        # A request that is under way is waited for, and has its own time limit.
        await self._background.cancel()
        await asyncio.to_thread(self._watch.join)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # ---- its own work ----

    async def _end_all(self) -> None:
        for number in self._ledger.numbers:
            self._ledger.tell(number)
        for number in list(self._orders):
            self._give_up(number)
        if self._pods.is_group:
            ask = partial(self._call, self._api.end_group)
            with contextlib.suppress(UnreachableError):
                await self._background.start(retry(ask, "end the gang", self._backoff(), self._timeouts.leave))
        await until(lambda: not self._ledger.runs(), self._changed, self._timeouts.leave)
        if self._ledger.numbers:
            self._background.start(self._delete_all())
        await until(lambda: not self._ledger.numbers, self._changed, self._timeouts.close)
        if self._parting:
            await asyncio.wait(self._parting, timeout=self._timeouts.close)
        if left := self._ledger.numbers:
            _log.error("the pods %s could not be deleted: they go with the job", ", ".join(map(self._pods.name, left)))

    def _begin(self) -> None:
        if not self._closed:
            self._watch.start()
            self._background.start(self._explain())
            self._background.start(self._tidy())

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do what blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _delete_all(self) -> None:
        """By force, if pods do not go in time. Not behind the requests that wait for the launcher's own threads."""
        deadline = time.monotonic() + self._timeouts.force
        while self._ledger.numbers:
            grace = KILL_GRACE if time.monotonic() < deadline else 0
            await retry(partial(asyncio.to_thread, self._api.delete_all, grace), "delete pods", self._backoff())
            await asyncio.sleep(self._timeouts.force)

    # ---- pods come and go ----

    def _ask_for_places(self) -> None:
        self._asking_soon = None
        if self._closed:
            return
        most, avoid = self._wanted
        waiting = self._ledger.wanted(PlaceState.WAITING)
        missing = most - len(waiting) - len(self._ledger.wanted(PlaceState.READY))
        for number in sorted(waiting, reverse=True)[:-missing] if missing < 0 else ():
            self._end(number, KILL_GRACE)
        for entry in self._ledger.ask(self._pods.may_ask(missing, len(self._ledger))):
            self._orders[entry.number] = self._pods.manifest(entry.number, entry.index, avoid)
            self._report(PlaceChanged(entry.place))
        if self._orders and self._creator is None:
            self._creator = self._background.start(self._create())

    async def _create(self) -> None:
        """Make the pods that are ordered, one after another, until there are none."""
        backoff = self._backoff()
        while self._orders:
            number, manifest = next(iter(self._orders.items()))
            self._asking = number
            try:
                pod = await self._request(manifest)
            except ApiError as failure:
                self._asking = None
                self._refused(number, failure)
                if not is_wrong(failure):
                    await asyncio.sleep(backoff.delay(failure.retry_after))
            else:
                self._asking = None
                backoff.reset()
                self._made(number, pod)
        self._creator = None

    def _refused(self, number: int, failure: ApiError) -> None:
        if failure.uncertain:
            self._doubtful.add(number)
        if is_wrong(failure):
            self._report(LauncherFailed(f"the cluster refuses the pods of the workers: {failure}"))
            self._orders.pop(number, None)
            return self._look(self._ledger.never(number, ExitCause.CRASHED, str(failure)))
        if number not in self._orders:
            return self._give_up(number)
        if failure.status == CONFLICT:  # the others need not wait until its name is free
            self._orders[number] = self._orders.pop(number)
        why = f"the cluster does not take its pod: {without_name(str(failure))}"
        for waiting in [number] if failure.status == CONFLICT else list(self._orders):
            self._look(self._ledger.refused(waiting, why))
        return None

    def _made(self, number: int, pod: Manifest) -> None:
        wanted = self._orders.pop(number, None) is not None
        self._doubtful.discard(number)
        self._look(self._ledger.created(pod))
        if not wanted:
            self._background.start(self._delete(number, KILL_GRACE))

    def _give_up(self, number: int) -> None:
        """A pod is wanted no more, and for all that is known it was not made. Of one for which a request is under way this is said
        after the answer."""
        self._orders.pop(number, None)
        if number == self._asking:
            return
        if number in self._doubtful:
            self._doubtful.discard(number)
            self._background.start(self._delete(number, KILL_GRACE))
        else:
            self._look(self._ledger.never(number, ExitCause.KILLED, "it had no place yet"))

    async def _explain(self) -> None:
        """Have the nodes of pods that do not start say why."""
        waited: set[int] = set()
        while True:
            await asyncio.sleep(self._timeouts.explain)
            starting = self._ledger.starting()
            for number in sorted(waited & starting.keys())[:EXPLAINED_AT_ONCE]:
                try:
                    warning = await self._call(self._api.warning, self._pods.name(number), starting[number])
                except ApiError as failure:
                    _log.info("why %s does not start is not known: %s", self._pods.name(number), failure)
                else:
                    self._look(self._ledger.warned(number, warning))
            waited = set(starting)

    async def _tidy(self) -> None:
        """Remove pods that are over, one after another, but the newest, and those that end with the job."""
        while True:
            older = self._ledger.left[:-KEPT]
            await asyncio.sleep(self._timeouts.over)
            for number in older:
                if self._closed:
                    return
                self._ledger.left.remove(number)
                await self._ask(number, self._api.delete, KILL_GRACE)

    async def _request(self, manifest: Manifest) -> Manifest:
        """The pod, be it new or made by a request of which the answer was lost."""
        name = manifest["metadata"]["name"]
        try:
            pod = await self._call(self._api.create, manifest)
        except ApiError as failure:
            if failure.status != CONFLICT:
                raise
            pod = await self._call(self._api.read, name)
            if not self._pods.owns(pod):
                raise ApiError(CONFLICT, f"there still is a pod {name} of another job") from failure
        if not self._pods.owns(pod):  # nobody would see what becomes of it
            raise ApiError(INVALID, f"something in the cluster takes labels or owners from pod {name}")
        return pod

    def _end(self, number: int, grace: int | None) -> None:
        if not self._ledger.tell(number):
            return
        if number in self._orders:
            self._give_up(number)
        elif number != self._asking:
            self._background.start(self._delete(number, grace))

    async def _delete(self, number: int, grace: int | None) -> None:
        """Until the cluster has heard of it; one that is killed until it is gone."""
        while await self._ask(number, self._api.delete, grace):
            if not grace:
                return
            await asyncio.sleep(self._timeouts.force)
            if number not in self._ledger:
                return
            grace = 0
        self._look(self._ledger.gone(number))

    async def _check(self, number: int) -> None:
        """It was not in the list of all pods: is it gone, or had it not yet come?"""
        pod = await self._ask(number, self._api.read)
        self._look(self._ledger.seen(pod) if pod else self._ledger.gone(number))

    def _number(self, name: str) -> int | None:
        """Of the pod with this name; None if it can't be one of ours."""
        number = name.rpartition("-")[2]
        return int(number) if number.isdecimal() and name == self._pods.name(int(number)) else None

    async def _ask(self, number: int, request: Callable[..., T], *arguments: object) -> T | None:
        """Ask about a pod until there is an answer; None if there is no such pod."""
        name = self._pods.name(number)

        async def attempt() -> T | None:
            with contextlib.suppress(NotThereError):
                return await self._call(request, name, *arguments)
            return None

        return await retry(attempt, f"ask for {name}", self._backoff())

    # ---- what the watches tell, on the event loop ----

    def pods_listed(self, pods: Sequence[Manifest]) -> None:
        ours = [pod for pod in pods if self._pods.owns(pod)]
        for pod in ours:
            self.pod_changed("MODIFIED", pod)
        for number in self._ledger.missing(ours):
            self._background.start(self._check(number))

    def pod_changed(self, kind: str, pod: Manifest) -> None:
        if not self._pods.owns(pod):
            return
        number = number_of(pod)
        if kind == "DELETED":
            self._look(self._ledger.gone(number, pod))
            return
        over = is_over(pod)
        if not (over or self._ledger.known(number)):  # asked for by a master that is gone, and made late
            self._report(PlaceChanged(self._ledger.adopt(pod)))
        self._look(self._ledger.seen(pod))
        # It was given up; or only a container beside the agent's still runs.
        if not (over or number in self._ledger or is_deleted(pod)):
            self._parting.add(self._background.start(self._ask(number, self._api.delete, KILL_GRACE)))

    def _look(self, reports: Reports) -> None:
        """Pass reports on, and see what else follows from the state that led to them."""
        for report in reports:
            self._report(report)
        trouble = self._ledger.image_trouble
        if trouble and trouble.lasting:
            self._report(LauncherFailed(f"no worker can be started: {trouble.reason}"))
        elif trouble and self._image_timer is None:
            self._image_timer = asyncio.get_running_loop().call_later(self._timeouts.image, self._give_up_image)
        elif self._image_timer and not trouble:
            self._image_timer.cancel()
            self._image_timer = None
        self._changed.set()

    def _give_up_image(self) -> None:
        if trouble := self._ledger.image_trouble:
            seconds = f"{self._timeouts.image:g} s"
            self._report(LauncherFailed(f"no worker could be started within {seconds}: {trouble.reason}"))
