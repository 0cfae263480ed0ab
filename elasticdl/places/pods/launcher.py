"""Workers as pods: `KubernetesLauncher` keeps the contract of `elasticdl.places.base.Launcher`.

Where a cluster makes the contract mean something of its own:

- A worker is *placed* when its container runs. Until then it is pending, for whatever reason.
- `terminate` deletes the pod with its grace period, `kill` with a second's: its process is still ended by its node, and
  the device is free before the next one gets it. Only when a pod is still there after `FORCE_SECONDS`, because its node is lost,
  it is taken off the books by force; whether the process has ended then nobody can tell.
- A pod is asked for until the cluster takes it. What it takes only later (a quota) is a reason to be pending, and all workers
  wait behind one back-off (`elasticdl.places.pods.shared_retry`); what it will never take is `LauncherFailed`.
- Of the pods that are over the newest are left for their logs, and go with the job; the others are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.kube.api_error import ABSENT, CONFLICT, ApiError
from elasticdl.kube.manifests.names import without_name, worker_name
from elasticdl.kube.retry import retry
from elasticdl.kube.watch import Listing, Receiver, Watch
from elasticdl.master.state.events import ExitCause, FoundWorker, LauncherFailed, StacksFound
from elasticdl.places.base import STACKS_SECONDS, Report
from elasticdl.places.pods.ledger import Ledger, Reports, found
from elasticdl.places.pods.leftovers import Leftovers
from elasticdl.places.pods.shared_retry import POLL_SECONDS, SharedRetry
from elasticdl.places.pods.worker_pods import Manifest, WorkerPodApi, WorkerPods, is_wrong, worker_id_of

# A request takes milliseconds, and hundreds of workers may be asked for at once.
REQUESTS_AT_ONCE = 8
# A log comes from its node, and that of a node which is lost comes late or never: who reads it must hold up nobody else.
LOGS_AT_ONCE = 4
KILL_GRACE = 1
FORCE_SECONDS = 15.0
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds."""

    image: float = 300.0  # for an image to be pulled, while no worker has ever run
    event: float = 1.0  # for the event that says why a pod was deleted
    force: float = FORCE_SECONDS  # for a node to end a pod that is killed
    close: float = 60.0
    start: float = 60.0  # for the first list
    first_retry: float = 0.5
    over: float = 60.0  # for pods that are over to be kept, however many there are
    longest_retry: float = 8.0  # so long may a job be blind after the API server is back


class KubernetesLauncher:
    def __init__(
        self, api: WorkerPodApi, pods: WorkerPods, report: Report, patience: Patience, rng: random.Random
    ) -> None:
        self._api = api
        self._pods = pods
        self._report = report
        self._patience = patience
        self._backoff = partial(Backoff, rng, patience.first_retry, patience.longest_retry)
        self._ledger = Ledger()
        self._changed = asyncio.Event()  # what the ledger says
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="kubernetes")
        self._log_threads = ThreadPoolExecutor(LOGS_AT_ONCE, thread_name_prefix="kubernetes-log")
        self._log_turns = asyncio.Semaphore(LOGS_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        soon = partial(_soon, asyncio.get_running_loop())
        pods_seen = Receiver(partial(soon, self.pods_listed), partial(soon, self.pod_changed))
        events_seen = Receiver(partial(soon, self.events_listed), partial(soon, self.event_changed))
        self._pod_watch = Watch(api.pods, pods_seen, self._backoff(), time.monotonic)
        self._event_watch = Watch(api.events, events_seen, self._backoff(), time.monotonic)
        self._refusals = SharedRetry(self._backoff())
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)  # to ask for a pod
        self._leftovers = Leftovers(patience.over)
        self._removal: asyncio.TimerHandle | None = None
        self._creating: dict[int, asyncio.Event] = {}  # set when there is no point in it any more
        self._image_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ---- the port ----

    async def find(self) -> tuple[FoundWorker, ...]:
        """Also begins to watch.

        Raises:
            UnreachableError: the cluster can't be asked.
        """
        ask = partial(self._call, self._api.pods.list)
        listing = await self._start(retry(ask, "list the workers' pods", self._backoff(), self._patience.start))
        ours = [pod for pod in listing.items if self._pods.owns(pod)]
        for pod in ours:
            self._ledger.adopt(pod)
        # What becomes of the workers is reported only after the caller knows that they were found.
        asyncio.get_running_loop().call_soon(self._begin, listing)
        return tuple(found(pod) for pod in ours)

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        if self._ledger.known(worker_id):
            raise ValueError(f"worker {worker_id} was launched before")
        place = self._ledger.launch(worker_id)
        self._creating[worker_id] = asyncio.Event()
        self._start(self._create(worker_id, self._pods.manifest(worker_id, place, away_from)))

    def terminate(self, worker_id: int) -> None:
        self._end(worker_id, None)

    def kill(self, worker_id: int) -> None:
        self._end(worker_id, KILL_GRACE)

    def read_stacks(self, worker_id: int) -> None:
        """From the log of its pod, where a worker that hangs has written them."""
        if worker_id in self._ledger and not self._closed:
            self._start(self._read_stacks(worker_id))

    def read_log(self, worker_id: int) -> None:
        self.read_stacks(worker_id)

    async def _read_stacks(self, worker_id: int) -> None:
        name, text, why = worker_name(self._pods.job, worker_id), "", ""
        try:
            async with self._log_turns:  # the time in the queue is not the node's
                read = asyncio.get_running_loop().run_in_executor(
                    self._log_threads, self._api.log, name, STACKS_SECONDS
                )
                text = await asyncio.wait_for(read, STACKS_SECONDS)
        except TimeoutError:
            why = f"its node has not shown its log within {STACKS_SECONDS:g} s"
        except ApiError as failure:
            why = f"its log can't be read: {without_name(str(failure))}"
        if worker_id in self._ledger:
            self._report(StacksFound(worker_id, text, why))

    async def close(self) -> None:
        if self._closed:
            return
        deadline = asyncio.get_running_loop().time() + self._patience.close
        for worker_id in self._ledger.workers:
            self._ledger.tell(worker_id)
        for given_up in self._creating.values():
            given_up.set()
        if self._ledger.workers:
            self._start(self._delete_all())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._ledger.workers:
                    self._changed.clear()
                    await self._changed.wait()
        if left := self._ledger.workers:
            _log.error("the pods of workers %s could not be deleted: they go with the job", left)
        await self.detach()

    async def detach(self) -> None:
        """Let the workers be: another master takes them over. Nothing can be launched afterwards."""
        self._closed = True
        for timer in (self._image_timer, self._removal):
            if timer:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        for watch in (self._pod_watch, self._event_watch):
            watch.stop()
        # A request that is under way is waited for, and has its own time limit.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        blocking: list[Callable[[], None]] = [self._pod_watch.join, self._event_watch.join]
        blocking += [partial(pool.shutdown, cancel_futures=True) for pool in (self._threads, self._log_threads)]
        await asyncio.gather(*(asyncio.to_thread(end) for end in blocking))

    # ---- its own work ----

    def _begin(self, listing: Listing) -> None:
        if not self._closed:
            self._pod_watch.start(listing)
            self._event_watch.start()
            self.pods_listed(listing.items)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ends with the launcher."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do what blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _delete_all(self) -> None:
        """By force, if pods do not go in time. Not behind the requests that wait for the launcher's own threads."""
        deadline = time.monotonic() + self._patience.force
        while self._ledger.workers:
            grace = KILL_GRACE if time.monotonic() < deadline else 0
            await retry(partial(asyncio.to_thread, self._api.delete_all, grace), "delete pods", self._backoff())
            await asyncio.sleep(self._patience.force)

    # ---- pods come and go ----

    async def _create(self, worker_id: int, manifest: Manifest) -> None:
        """Ask for the pod until the cluster takes it, or nobody wants it any more."""
        given_up, conflicts, certain = self._creating[worker_id], self._backoff(), True
        try:
            while not given_up.is_set():
                try:
                    answer = await self._request_in_turn(manifest, given_up)
                except ApiError as failure:
                    certain = certain and not failure.uncertain
                    if is_wrong(failure):
                        self._report(LauncherFailed(f"the cluster refuses the pods of the workers: {failure}"))
                        self._look(worker_id, self._ledger.never(worker_id, ExitCause.CRASHED, str(failure)))
                        return
                    why = f"the cluster does not take its pod: {without_name(str(failure))}"
                    answer = POLL_SECONDS
                    if failure.status == CONFLICT:  # it is this pod's own affair
                        answer = conflicts.delay()
                    else:
                        self._refusals.refused(why, asyncio.get_running_loop().time(), failure.retry_after)
                    self._look(worker_id, self._ledger.refused(worker_id, why))
                if not isinstance(answer, float):
                    self._look(worker_id, self._ledger.created(answer))
                    certain = False
                    break
                await _until(given_up, answer)
        finally:
            del self._creating[worker_id]
        if not given_up.is_set() and (worker_id in self._ledger or worker_id in self._leftovers):
            return
        if certain:
            self._look(worker_id, self._ledger.never(worker_id, ExitCause.KILLED, "it had no place yet"))
        else:  # also if it was seen to go before we knew that it had come
            await self._delete(worker_id, KILL_GRACE)

    async def _request_in_turn(self, manifest: Manifest, given_up: asyncio.Event) -> Manifest | float:
        """The pod, or after how many seconds it may be its turn, if others are refused."""
        async with self._turns:
            if given_up.is_set():
                return 0.0
            if wait := self._refusals.wait(asyncio.get_running_loop().time()):
                worker_id = worker_id_of(manifest)
                self._look(worker_id, self._ledger.refused(worker_id, self._refusals.reason))
                return wait
            try:
                pod = await self._request(manifest)
            except ApiError as failure:
                if failure.status == CONFLICT or is_wrong(failure):
                    self._refusals.succeeded()
                raise
            self._refusals.succeeded()
            return pod

    async def _request(self, manifest: Manifest) -> Manifest:
        """The pod, be it new or made by a request of which the answer was lost."""
        try:
            return await self._call(self._api.create, manifest)
        except ApiError as failure:
            if failure.status != CONFLICT:
                raise
            name = manifest["metadata"]["name"]
            pod = await self._call(self._api.read, name)
            if not self._pods.owns(pod):
                raise ApiError(CONFLICT, f"there still is a pod {name} of another job") from failure
            return pod

    def _end(self, worker_id: int, grace: int | None) -> None:
        if not self._ledger.tell(worker_id):
            return
        if given_up := self._creating.get(worker_id):
            given_up.set()
        else:
            self._start(self._delete(worker_id, grace))

    async def _delete(self, worker_id: int, grace: int | None) -> None:
        """Until the cluster has heard of it; one that is killed until it is gone."""
        while await self._ask(worker_id, self._api.delete, grace):
            if not grace:
                return
            await asyncio.sleep(self._patience.force)
            if worker_id not in self._ledger:
                return
            grace = 0
        self._look(worker_id, self._ledger.gone(worker_id))

    async def _check(self, worker_id: int) -> None:
        """It was not in the list of all pods: is it gone, or had it not yet come?"""
        pod = await self._ask(worker_id, self._api.read)
        self._look(worker_id, self._ledger.seen(pod) if pod else self._ledger.gone(worker_id))

    async def _ask(self, worker_id: int, request: Callable[..., T], *arguments: object) -> T | None:
        """Ask about a worker's pod until there is an answer; None if there is no such pod."""
        name = worker_name(self._pods.job, worker_id)

        async def attempt() -> T | None:
            try:
                return await self._call(request, name, *arguments)
            except ApiError as failure:
                if failure.status != ABSENT:
                    raise
                return None

        return await retry(
            attempt, name, self._backoff(), failed=lambda failure: _log.info("asking again for %s: %s", name, failure)
        )

    # ---- what the watches tell, on the event loop ----

    def pods_listed(self, pods: tuple[Manifest, ...]) -> None:
        ours = [pod for pod in pods if self._pods.owns(pod)]
        for pod in ours:
            self.pod_changed("MODIFIED", pod)
        for worker_id in self._ledger.missing(ours):
            self._start(self._check(worker_id))

    def pod_changed(self, kind: str, pod: Manifest) -> None:
        if not self._pods.owns(pod):
            return
        worker_id = worker_id_of(pod)
        if kind == "DELETED":
            self._look(worker_id, self._ledger.gone(worker_id, pod))
            return
        self._look(worker_id, self._ledger.seen(pod))
        # Made late, for a master that is gone or a request that was given up; or only a container beside it still runs.
        over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if self._ledger.unwanted(worker_id) and not (over or pod["metadata"].get("deletionTimestamp")):
            self._start(self._delete(worker_id, KILL_GRACE))

    def events_listed(self, events: tuple[Manifest, ...]) -> None:
        for event in events:
            self.event_changed("ADDED", event)

    def event_changed(self, kind: str, event: Manifest) -> None:
        about = event["involvedObject"]
        if event.get("reason") == "FailedScheduling":
            self._ledger.finds_no_place(about)
        job, _, number = str(about.get("name", "")).rpartition("-worker-")
        if kind != "DELETED" and job == self._pods.job and number.isdigit():
            self._look(int(number), self._ledger.happened(int(number), event))

    def _look(self, worker_id: int, reports: Reports) -> None:
        """Pass reports on, and see what else follows from the state that led to them."""
        for report in reports:
            self._report(report)
        loop = asyncio.get_running_loop()
        if self._ledger.held(worker_id):
            loop.call_later(self._patience.event, lambda: self._look(worker_id, self._ledger.settle(worker_id)))
        for left in self._ledger.take_left():
            self._leftovers.add(left, loop.time())
        self._plan_removal()
        trouble = self._ledger.image_trouble
        if trouble and trouble.lasting:
            self._report(LauncherFailed(f"no worker can be started: {trouble.reason}"))
        elif trouble and self._image_timer is None:
            self._image_timer = loop.call_later(self._patience.image, self._give_up_image)
        elif self._image_timer and not trouble:
            self._image_timer.cancel()
            self._image_timer = None
        self._changed.set()

    def _plan_removal(self) -> None:
        """Of pods that are over, when the first of them need not be kept any more."""
        loop = asyncio.get_running_loop()
        if self._removal is None and not self._closed and (wait := self._leftovers.next(loop.time())) is not None:
            self._removal = loop.call_later(max(wait, POLL_SECONDS), self._remove)

    def _remove(self) -> None:
        self._removal = None
        if workers := self._leftovers.take(asyncio.get_running_loop().time()):
            ask = partial(self._call, self._api.remove, workers)
            self._start(retry(ask, "remove pods that are over", self._backoff()))
        self._plan_removal()

    def _give_up_image(self) -> None:
        if trouble := self._ledger.image_trouble:
            seconds = f"{self._patience.image:g} s"
            self._report(LauncherFailed(f"no worker could be started within {seconds}: {trouble.reason}"))


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until it happens."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """From a watch's thread."""
    with contextlib.suppress(RuntimeError):  # the event loop is over
        loop.call_soon_threadsafe(callback, *arguments)
