"""An API server in memory: the few calls that are made, and whatever failures a test puts before them."""

import copy
import itertools
import queue
import threading

from elasticdl.kube.client import ApiError, NotThereError

STOP = object()
OVER = ("Succeeded", "Failed")


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


class FakeObjects:
    """Objects of one kind, by name: what is listed and watched."""

    def __init__(self):
        self.lock = threading.RLock()
        self.objects = {}
        self.history = []
        self.versions = itertools.count(1)
        self.version = 0
        self.streams = []
        self.failures = []  # raised by the next calls of list and watch, in turn
        self.lists = 0

    def put(self, name, item, kind=None):
        with self.lock:
            self.version = next(self.versions)
            item = copy.deepcopy(item)
            item["metadata"]["resourceVersion"] = str(self.version)
            kind = kind or ("MODIFIED" if name in self.objects else "ADDED")
            self.objects[name] = item
            if kind == "DELETED":
                del self.objects[name]
            change = (kind, item)
            self.history.append((self.version, change))
            for stream in self.streams:
                stream.items.put(change)
            return item

    def list(self):
        with self.lock:
            self.lists += 1
            self._fail()
            return {"items": list(self.objects.values()), "metadata": {"resourceVersion": str(self.version)}}

    def watch(self, version):
        with self.lock:
            self._fail()
            stream = FakeStream()
            for number, change in self.history:
                if number > int(version):
                    stream.items.put(change)
            self.streams.append(stream)
            return stream

    def interrupt(self, failure=STOP, *, forget=False):
        """End the present watches; ``forget``: and what they would have to be told next."""
        with self.lock:
            streams, self.streams = self.streams, []
            if forget:
                self.history = []
            for stream in streams:
                stream.items.put(failure)

    def _fail(self):
        if self.failures:
            raise self.failures.pop(0)


class FakePods:
    """What is done to pods; each method first fails as told, by name."""

    def __init__(self, objects):
        self.objects = self.pods = objects
        self.warnings = {}  # what a node warns of, by a pod's name
        self.failures = {}  # a list of failures for each method
        self.calls = []
        self.uids = itertools.count()
        self.called = threading.Condition()
        self.quota = None  # as many pods as there may be
        self.lingering = False  # deleted pods stay until forced

    def create(self, manifest):
        self._call("create", manifest["metadata"]["name"])
        return self._create(manifest)

    def _create(self, manifest):
        with self.objects.lock:  # of several that ask at once, no more are let in than the quota has room for
            there = [pod for pod in self.objects.objects.values() if pod["status"]["phase"] not in OVER]
            if self.quota is not None and len(there) >= self.quota:
                raise ApiError(403, f"exceeded quota: team, requested: pods=1, used: pods={self.quota}")
            name = manifest["metadata"]["name"]
            if name in self.objects.objects:
                raise ApiError(409, f'pods "{name}" already exists')
            made = copy.deepcopy(manifest)
            made["metadata"]["uid"] = f"uid-{name}-{next(self.uids)}"
            made["status"] = {"phase": "Pending"}
            return self.objects.put(name, made)

    def read(self, name):
        self._call("read", name)
        return self._find(name)

    def warning(self, name, uid):
        self._call("warning", name, uid)
        return self.warnings.get(name, "")

    def delete(self, name, grace):
        self._call("delete", name, grace)
        with self.objects.lock:
            if name not in self.objects.objects:
                return False
            pod = self._find(name)
            if grace == 0 or not self.lingering:
                self.objects.put(name, pod, "DELETED")
            else:
                self.objects.put(name, {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "now"}})
            return True

    def delete_all(self, grace):
        self._call("delete_all", grace)
        with self.objects.lock:
            for name in list(self.objects.objects):
                self.objects.put(name, self.objects.objects[name], "DELETED")

    def end_group(self):
        self._call("end_group")

    def _find(self, name):
        if name not in self.objects.objects:
            raise NotThereError(404, f'pods "{name}" not found')
        return self.objects.objects[name]

    def _call(self, method, *arguments):
        with self.called:
            self.calls.append((method, *arguments))
            self.called.notify_all()
        if failures := self.failures.get(method):
            raise failures.pop(0)
