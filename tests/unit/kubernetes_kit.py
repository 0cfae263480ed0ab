"""Pods as clusters show them, cut down to what is looked at, an API server in memory, and scenes of pods as places on it."""

import asyncio
import copy
import itertools
import queue
import random
import threading
from contextlib import asynccontextmanager

from elasticdl.job.spec import WorkerRange
from elasticdl.kube.client import ApiError, NotThereError
from elasticdl.kube.names import job_reference
from elasticdl.master.core.events import LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost
from elasticdl.places.pod_places import PodPlaces, PodTimeouts
from elasticdl.places.worker_pods import WorkerPods

JOB, NAMESPACE = "digits", "lab"
OWNERS = [job_reference({"metadata": {"name": "digits-master", "uid": "owner-uid"}})]
CONTAINER = {"name": "elasticdl", "image": "i", "env": [{"name": "A", "value": "1"}]}
TEMPLATE = {
    "metadata": {"labels": {"elasticdl.org/job": JOB, "elasticdl.org/role": "worker"}, "annotations": {}},
    "spec": {"restartPolicy": "Never", "containers": [CONTAINER]},
}
PODS = WorkerPods(JOB, NAMESPACE, OWNERS, TEMPLATE, limits=lambda: WorkerRange(minimum=1, maximum=4))
RUNNING = {"running": {"startedAt": "2024-01-01T00:00:00Z"}}
DEADLINE = 20.0
RETRIES = {"first_retry": 0.01, "longest_retry": 0.02}
QUICK = {"image": 0.05, "explain": 0.02, "force": 0.05, "leave": 0.05, "close": 5.0, "start": 0.3, **RETRIES}
STOP = object()


def terminated(code, reason=None, message=""):
    reason = reason or ("Error" if code else "Completed")
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


def condition(kind, status="True", reason="", message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(worker_id=0, phase="Pending", state=None, *, node="n0", conditions=(), deleted=False, manifest=None, **status):
    """A pod of the job; ``state`` is that of its container."""
    made = copy.deepcopy(manifest or PODS.manifest(worker_id, worker_id))
    extra = {"deletionTimestamp": "2024-01-01T00:00:30Z"} if deleted else {}
    metadata = {"uid": f"uid-{worker_id}", **made["metadata"], "resourceVersion": "1", **extra}
    spec = {**made["spec"], **({"nodeName": node} if node else {})}
    known = {"podIP": "10.0.0.7", "containerStatuses": [{"name": "elasticdl", "state": state}]} if state else {}
    status = {"phase": phase, "conditions": list(conditions), **known, **status}
    return {**made, "metadata": metadata, "spec": spec, "status": status}


def name(number):
    return f"{JOB}-worker-{number}"


class FakeStream:
    def __init__(self):
        self.items = queue.Queue()

    def __iter__(self):
        while (item := self.items.get(timeout=30)) is not STOP:
            if isinstance(item, Exception):
                raise item
            yield item

    def stop(self):
        self.items.put(STOP)


class FakePods:
    """The API server: what is asked of it about pods. Each method first fails as told, by its name."""

    def __init__(self):
        self.pods = self  # what is listed and watched
        self.there = {}  # by name
        self.lock = threading.RLock()
        self.history, self.streams, self.version = [], [], 0
        self.uids = itertools.count()
        self.warnings = {}  # what a node warns of, by a pod's name
        self.failures = {}  # a list of failures for each method
        self.calls = []
        self.quota = None  # as many pods as there may be
        self.lingering = False  # deleted pods stay until forced

    def put(self, item, kind=None):
        """This pod is now so."""
        with self.lock:
            self.version += 1
            item, named = copy.deepcopy(item), item["metadata"]["name"]
            item["metadata"]["resourceVersion"] = str(self.version)
            change = (kind or ("MODIFIED" if named in self.there else "ADDED"), item)
            self.there[named] = item
            if kind == "DELETED":
                del self.there[named]
            self.history.append((self.version, change))
            for stream in self.streams:
                stream.items.put(change)
            return item

    def interrupt(self, failure=STOP, *, forget=False):
        """End the present watches; ``forget``: and what they would have to be told next."""
        with self.lock:
            streams, self.streams = self.streams, []
            if forget:
                self.history = []
            for stream in streams:
                stream.items.put(failure)

    def made(self, manifest):
        with self.lock:  # of several that ask at once, no more are let in than the quota has room for
            named = manifest["metadata"]["name"]
            live = [each for each in self.there.values() if each["status"]["phase"] not in ("Succeeded", "Failed")]
            if self.quota is not None and len(live) >= self.quota:
                raise ApiError(403, f"exceeded quota: team, requested: pods=1, used: pods={self.quota}")
            if named in self.there:
                raise ApiError(409, f'pods "{named}" already exists')
            metadata = {**manifest["metadata"], "uid": f"uid-{named}-{next(self.uids)}"}
            return self.put({**manifest, "metadata": metadata, "status": {"phase": "Pending"}})

    # ---- what is asked of it ----

    def list(self):
        with self.lock:
            self._call("list")
            return {"items": list(self.there.values()), "metadata": {"resourceVersion": str(self.version)}}

    def watch(self, version):
        with self.lock:
            self._call("watch")
            stream = FakeStream()
            for number, change in self.history:
                if number > int(version):
                    stream.items.put(change)
            self.streams.append(stream)
            return stream

    def create(self, manifest):
        self._call("create", manifest["metadata"]["name"])
        return self.made(manifest)

    def read(self, name):
        self._call("read", name)
        if name not in self.there:
            raise NotThereError(404, f'pods "{name}" not found')
        return self.there[name]

    def warning(self, name, uid):
        self._call("warning", name)
        return self.warnings.get(name, "") if self.there[name]["metadata"]["uid"] == uid else "of another pod"

    def delete(self, name, grace):
        self._call("delete", name, grace)
        with self.lock:
            if found := self.there.get(name):
                lingers = {**found["metadata"], "deletionTimestamp": "now"}
                self.put(*([{**found, "metadata": lingers}] if grace and self.lingering else [found, "DELETED"]))
            return bool(found)

    def delete_all(self, grace):
        self._call("delete_all", grace)
        with self.lock:
            for each in list(self.there.values()):
                self.put(each, "DELETED")

    def end_group(self):
        self._call("end_group")

    def _call(self, method, *arguments):
        self.calls.append((method, *arguments))
        if failures := self.failures.get(method):
            raise failures.pop(0)


def told(report):
    """In the words of a story."""
    match report:
        case PlaceChanged(place) if place == Place(place.id):
            return f"{place.id.rpartition('-')[2]} is asked for"
        case PlaceChanged(place):
            return f"{seen(place)}{': ' * bool(place.reason)}{place.reason}"
        case PlaceLost(place_id, cause, code, detail):
            return f"{place_id.rpartition('-')[2]} lost: {cause} {code}, {detail}"
        case LauncherFailed(reason):
            return f"failed: {reason}"


def seen(place):
    return f"{place.id.rpartition('-')[2]} {place.state}{' on ' * bool(place.node)}{place.node}"


class PlacesAndHands:
    """Pods as places, and the hands of who does something to them."""

    def __init__(self, workers, timeouts):
        self.pods, self.reports, self.workers = FakePods(), asyncio.Queue(), workers
        self.timeouts = PodTimeouts(**timeouts)
        self.places = self.another()
        self.closing = None

    def another(self):
        return PodPlaces(self.pods, self.workers, self.reports.put_nowait, self.timeouts, random.Random(1))

    def want(self, most):
        self.places.want(most, frozenset())

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await asyncio.sleep(0.002)

    async def called(self, *call, times=1):
        """Wait until a request was made so often; its last words may be left out."""
        await self.until(lambda: sum(each[: len(call)] == call for each in list(self.pods.calls)) >= times)

    async def next(self):
        """What is reported next, but that a place is asked for."""
        while (report := told(await asyncio.wait_for(self.reports.get(), DEADLINE))).endswith(" is asked for"):
            pass
        return report

    async def show(self, number, phase="Running", state=RUNNING, **more):
        """The cluster sets the status of a worker's pod, which is there or about to be."""
        await self.until(lambda: name(number) in self.pods.there)
        self.pods.put(pod(number, phase, state, manifest=self.pods.there[name(number)], **more))

    def remove(self, number):
        self.pods.put(self.pods.there[name(number)], "DELETED")

    async def ready(self, count):
        self.want(count)
        for number in range(count):
            await self.show(number)
            assert await self.next() == f"{number} ready on n0"


def scene(workers=PODS, *, found=True, **timeouts):
    """``found``: what there is was asked for."""

    @asynccontextmanager
    async def opened():
        made = PlacesAndHands(workers, QUICK | timeouts)
        try:
            if found:
                await made.places.found()
            yield made
        finally:
            await made.places.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]

    return opened
