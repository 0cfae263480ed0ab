"""Pods as places, and their watches, when the API server refuses, forgets, answers late or not at all, as stories.

A line of a story says what happens to pods (see `happens`), and after the arrow what is reported of places, in this order, and
what is asked of the server meanwhile. ``...`` stands for the rest of a text.
"""

import asyncio
import copy
import itertools
import queue
import random
import re
import threading
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from kubernetes_kit import JOB, NAMESPACE, OWNERS, PODS, RUNNING, condition, pod, terminated, waiting

from elasticdl.cli import namespace_job
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.client import ApiError, NotDoneError, NotThereError, Watch
from elasticdl.kube.manifests import worker_template
from elasticdl.master.core.events import LauncherFailed
from elasticdl.master.shell import cluster_master
from elasticdl.places.base import Place, PlaceChanged, PlaceLost
from elasticdl.places.pod_places import KEPT, REQUESTS_AT_ONCE, PodPlaces, PodTimeouts
from elasticdl.places.worker_pods import WorkerPodApi, WorkerPods, index_of
from tests.stories import on, parts_of, settings_of, told_in

DEADLINE = 20.0
RETRIES = {"first_retry": 0.01, "longest_retry": 0.02}
QUICK = {"image": 0.05, "explain": 0.02, "force": 0.05, "leave": 0.05, "close": 5.0, "start": 0.3, **RETRIES}


def name(number):
    return f"{JOB}-worker-{number}"


class FakeStream(queue.Queue):
    def __iter__(self):
        while item := self.get(timeout=30):
            if isinstance(item, Exception):
                raise item
            yield item

    def stop(self):
        self.put(None)


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
                stream.put(change)
            return item

    def interrupt(self, failure, *, forget):
        """End the present watches; ``forget``: and what they would have to be told next."""
        with self.lock:
            streams, self.streams = self.streams, []
            self.history = [] if forget else self.history
            for stream in streams:
                stream.put(failure)

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
                    stream.put(change)
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
            if (found := self.there.get(name)) and grace and self.lingering:
                self.put({**found, "metadata": {**found["metadata"], "deletionTimestamp": "now"}})
            elif found:
                self.put(found, "DELETED")
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


def scene(workers=PODS, **timeouts):
    @asynccontextmanager
    async def opened():
        made = PlacesAndHands(workers, QUICK | timeouts)
        try:
            await made.places.found()
            yield made
        finally:
            await made.places.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]

    return opened


BY_KUEUE = condition("TerminationTarget", "True", "WorkloadEvictedDueToPreempted", "for another")
AS_ROOT = "container has runAsNonRoot and image will run as root"
REJECTED = {"reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
SHOWN = {
    "is not scheduled": partial(pod, conditions=[condition("PodScheduled", "False", "Unschedulable", "0/2")], node=""),
    "is created": partial(pod, state=waiting("ContainerCreating")),
    "is unpulled": partial(pod, state=waiting("ErrImagePull", "not found")),
    "is still unpulled": partial(pod, state=waiting("ImagePullBackOff", "Back-off")),
    "is root": partial(pod, state=waiting("CreateContainerConfigError", AS_ROOT)),
    "runs": partial(pod, phase="Running", state=RUNNING),
    "is deleted": partial(pod, phase="Running", state=RUNNING, deleted=True),
    "is silent": partial(pod, phase="Running", state=RUNNING, conditions=[condition("Ready", "False")]),
    "exits beside another": partial(pod, phase="Running", state=terminated(0)),
    "is done": partial(pod, phase="Succeeded", state=terminated(0)),
    "fails": partial(pod, phase="Failed", state=terminated(3)),
    "is rejected": partial(pod, phase="Failed", **REJECTED),
    "is preempted": partial(pod, phase="Running", state=RUNNING, conditions=[BY_KUEUE], deleted=True),
    "has left": partial(pod, phase="Failed", state=terminated(143), conditions=[BY_KUEUE], deleted=True),
}
ANOTHERS = {**pod(0), "metadata": {**pod(0)["metadata"], "ownerReferences": []}}


async def happens(scene, line):
    """``want 2``, ``1 run``, ``pod 0 fails``, ``refuse create x2: 403 why``; others are below."""
    match line.split():
        case [count, "run"]:
            scene.want(int(count))
            await play(scene, [f"pod {number} runs -> {number} ready on n0" for number in range(int(count))])
        case ["want", most, *avoid]:
            scene.places.want(int(most), frozenset(avoid[-1:]))
        case ["give", "back", number, *at_once]:
            scene.places.give_back(name(number), at_once=bool(at_once))
        case ["refuse", *_]:
            method, times, status, why = re.fullmatch(r"refuse (\w+)(?: x(\d+))?: (\d+) (.*)", line).groups()
            scene.pods.failures.setdefault(method, []).extend([ApiError(int(status), why)] * int(times or 1))
        case ["warning", number, *why]:
            scene.pods.warnings[name(number)] = " ".join(why)
        case ["pod", number, "is", "gone"]:
            scene.pods.put(scene.pods.there[name(number)], "DELETED")
        case ["pod", number, "comes"]:  # late, asked for by somebody before
            scene.pods.made(PODS.manifest(int(number), 1))
        case ["pod", number, "has", "another", "container"]:
            spec = scene.pods.there[name(number)]["spec"]
            spec["containers"] = [*spec["containers"], {"name": "istio-proxy"}]
        case ["pod", number, *_]:
            await scene.until(lambda: name(number) in scene.pods.there)
            shown = SHOWN[line.removeprefix(f"pod {number} ")]
            scene.pods.put(shown(int(number), manifest=scene.pods.there[name(number)]))
        case ["another's", "is", "there"]:
            scene.pods.put(ANOTHERS)
        case ["nodes", "linger"]:
            scene.pods.lingering = True
        case ["after", seconds]:
            await asyncio.sleep(float(seconds))
        case ["the", "job", "ends"]:
            scene.closing = asyncio.ensure_future(scene.places.close())
            await asyncio.sleep(0)
        case ["all", "is", "closed"]:
            await (scene.closing or scene.places.close())
        case ["the", "master", "leaves"]:
            await scene.places.close(keep=True)
        case ["another", "begins"]:
            scene.places = scene.another()
            scene.found = [seen(place) for place in await scene.places.found()]
            assert scene.reports.empty(), "what became of them is told afterwards"
        case _:
            raise ValueError(line)


async def follows(scene, expected):
    match expected.split():
        case ["asks", method, *words]:
            times = int(words.pop()[1:]) if words and words[-1].startswith("x") else 1
            at = [*map(name, words[:1])] + [int(each) if each.isdecimal() else None for each in words[1:]]
            await scene.called(method, *at, times=times)
        case ["found", *_]:
            assert f"found {', '.join(scene.found)}" == expected
        case ["pod", number, "has", "index", index]:
            await scene.called("create", name(number))
            assert index_of(scene.pods.there[name(number)]) == int(index)
        case ["pod", number, "avoids", node]:
            assert node in str(scene.pods.there[name(number)]["spec"]["affinity"]["nodeAffinity"])
        case ["first", method]:
            others = [call[0] for call in scene.pods.calls if call[0] not in ("list", "watch", "create")]
            assert others[0] == method
        case ["no", method]:
            assert method not in [call[0] for call in scene.pods.calls]
        case ["..."]:  # from now on whatever is told
            scene.reports = asyncio.Queue()
        case ["pods", *numbers]:
            await scene.until(lambda: sorted(scene.pods.there) == sorted(map(name, numbers)))
        case _:
            report = await scene.next()
            assert report == expected or (expected.endswith("...") and report.startswith(expected[:-3]))


async def play(scene, lines):
    for line in lines:
        happening, _, following = line.partition("->")
        for each in parts_of(happening):
            await happens(scene, each)
        for each in parts_of(following):
            await follows(scene, each)
    while not scene.reports.empty():
        assert told(scene.reports.get_nowait()).endswith(" is asked for")


NOT_TAKEN = "0 waiting: the cluster does not take its pod: "
NOT_YET = "0 waiting: the scheduler has not looked at it yet"
STORIES = f"""
a pod that no cluster would take ends the job with that line
  refuse create: 422 Pod "x" is invalid: spec.volumes[0]; want 1
      -> failed: the cluster refuses the pods of the workers: Pod "x" is invalid: spec.volumes[0]; 0 lost: crashed 1, ...
a pod that is refused for now is asked for again
  for WHY in 429 too many requests, 500 etcdserver: timed out, 0 refused, 400 as the podgroup phase is Pending
  refuse create x2: WHY; want 1 not on n9 -> {NOT_TAKEN}...; asks create 0 x3; {NOT_YET}; pod 0 avoids n9
a pod of which the answer was lost is taken for ours
  pod 0 comes; refuse create: 0 the connection broke; want 1 -> {NOT_TAKEN}the connection broke; asks read 0; {NOT_YET}
  pod 0 runs -> 0 ready on n0
a pod of an older job of the name is waited for, and holds up no other
  another's is there; want 2 -> {NOT_TAKEN}there still is a pod {name(0)} of another job; asks create 1
  pod 0 is gone -> asks create 0 x2; pods 0 1; ...
a pod that is given up while it is asked for is never made
  refuse create x1000: 403 pods "x" is forbidden: exceeded quota; want 1 -> {NOT_TAKEN}exceeded quota
  give back 0 at once -> 0 lost: killed -9, it had no place yet; no delete
one that may have been made is deleted in any case, also if it comes late
  refuse create x1000: 0 timed out; want 1 -> {NOT_TAKEN}timed out
  give back 0 -> 0 lost: killed -9, ...; asks delete 0 1
  pod 0 comes -> asks delete 0 1 x2
a pod that its node does not end is forced off the books
  1 run; nodes linger; give back 0 at once -> 0 ending on n0: its pod is being deleted;
      asks delete 0 0; 0 lost: killed -9, as told
deleting goes on until the server has heard
  1 run; refuse delete: 503 x; refuse delete: 0 y; refuse delete: 429 z; give back 0
      -> 0 lost: killed -9, as told; asks delete 0 None x4
why a pod waits is told once, however often it is seen, and a start that takes its course is no news
  want 2; pod 0 is not scheduled -> 0 waiting: 0/2
  pod 0 is not scheduled; pod 1 is created; pod 1 runs -> 1 ready on n0
  pod 0 is unpulled -> 0 waiting on n0: the image can't be pulled: not found
  pod 0 is still unpulled; pod 0 runs -> 0 ready on n0
an image that can't be pulled ends a job that never had a worker
  want 1; pod 0 is unpulled -> 0 waiting on n0: the image can't be pulled: not found;
      failed: no worker could be started within 0.05 s: the image can't be pulled: not found
but no other
  1 run; want 2; pod 1 is unpulled; after 0.1 -> 1 waiting on n0: the image can't be pulled: not found
a node that refuses a pod is known before it is lost
  want 1; pod 0 is rejected -> 0 waiting on n0; 0 lost: evicted -9, Allocate failed
what a master before has left is found and then told, and no name is used again
  2 run; the master leaves; pod 0 fails; pod 7 comes
  another begins -> found 0 lost on n0, 1 ready on n0, 7 waiting; 0 lost: crashed 3, ...
  want 3; pod 7 runs -> asks create 8; 7 ready on n0
the lowest index that is free is taken again, and no number
  3 run; pod 0 is done -> 0 lost: clean 0, exit code 0
  want 4 -> pod 3 has index 0; pod 4 has index 3
in a pod that may never be heard of again nobody is started
  3 run; pod 0 is silent; pod 1 is deleted
      -> 0 ending on n0: node n0 does not answer; 1 ending on n0: its pod is being deleted
  the master leaves; another begins -> found 0 ending on n0, 1 ending on n0, 2 ready on n0
  pod 0 runs -> 0 ready on n0
a pod that a master before has asked for and that comes late is a place as well
  1 run; pod 7 comes; after 0.05; want 2; pod 7 runs -> 7 ready on n0; pods 0 7
a container beside the worker is ended with it
  1 run; pod 0 has another container; pod 0 exits beside another -> 0 lost: clean 0, exit code 0; asks delete 0 1
also with the job: else the pod keeps its GPU, and the job's time to live never begins
  1 run; pod 0 has another container; refuse delete x3: 503 x; the job ends; pod 0 exits beside another
  all is closed -> 0 lost: clean 0, exit code 0; pods
closing waits until all is gone, whatever the server refuses
  2 run; refuse delete_all: 503 x; want 3; all is closed -> 0 lost: killed -9, as told; 1 lost: killed -9, as told; pods
  want 1; after 0.05 -> pods
the node of a pod that does not start is asked why
  refuse warning: 403 forbidden; warning 0 no such claim; want 1; pod 0 is created
      -> 0 waiting on n0: it can't be started on node n0: no such claim; asks warning 0 x2
  pod 0 runs -> 0 ready on n0
an image that runs as root ends a job at once with the remedy (image=20)
  want 1; pod 0 is root
      -> 0 waiting on n0: nothing may run as root here: ...; failed: no worker can be started: nothing may run as root...
a job that ends lets its agents leave, so that their logs stay (leave=20)
  1 run; the job ends; pod 0 is done; all is closed -> 0 lost: clean 0, exit code 0; no delete_all; pods 0
closing is bounded (leave=0.01, close=0.1)
  1 run; refuse delete_all x1000: 503 x; all is closed
of the pods that are over the newest are kept, and all of them for a while (over=0.3)
  {KEPT + 1} run; pod 0 fails -> 0 lost: crashed 3, ...
  {"; ".join(f"pod {number} fails" for number in range(1, KEPT + 1))}
      -> {"; ".join(f"{number} lost: crashed 3, ..." for number in range(1, KEPT + 1))}; no delete;
      asks delete 0 1; pods {" ".join(map(str, range(1, KEPT + 1)))}
who waits is dropped, the newest first, and who runs is not
  1 run; want 3 -> asks create 2
  want 2 -> 2 lost: killed -9, ...
  want 0 -> 1 lost: killed -9, ...
  want 0; after 0.05 -> pods 0
"""


@pytest.mark.parametrize("story", list(told_in(STORIES)))
def test_what_becomes_of_pods(story):
    run(story[1:], **{name: float(seconds) for name, seconds in settings_of(story[0]).items()})


def run(lines, **limits):
    async def whole():
        async with scene(**limits)() as opened:
            await play(opened, lines)

    asyncio.run(whole())


# ---- a gang in a queue of Kueue's: never more pods than its size, and none is kept when the job is over ----

SPEC = JobSpec.model_validate({"image": "i", "job_name": JOB, "gang": True, "queue": "kueue=train", "num_workers": "2"})
OF_TWO = WorkerRange(minimum=2, maximum=2)
GANG = WorkerPods(JOB, NAMESPACE, OWNERS, worker_template(SPEC, NAMESPACE), lambda: OF_TWO)
GANG_STORIES = """
a gang that is preempted asks for others when its pods are over: Kueue would delete them, as those that leave count
  2 run; pod 0 is preempted; pod 1 is preempted -> 0 ending ...; 1 ending ...
  want 2; after 0.05 -> pods 0 1
  pod 1 has left -> 1 lost: preempted ...
  want 2 -> asks create 2
  pod 0 has left -> 0 lost: preempted ...
  want 2 -> asks create 3
a job that ends has Kueue keep none of its pods
  2 run; refuse end_group: 503 away; all is closed -> asks end_group x2; 0 lost: ...; 1 lost: ...; first end_group
and it ends whatever comes of that
  2 run; refuse end_group x1000: 503 away; all is closed -> asks end_group; 0 lost: ...; 1 lost: ...; first end_group
"""


@pytest.mark.parametrize("story", list(told_in(GANG_STORIES)))
def test_what_becomes_of_a_gang(story):
    run(story[1:], workers=GANG)


class Kueue:
    """Keeps pods of one job until their group is over."""

    def __init__(self, failure=None):
        self.failure, self.over = failure, []
        self.pods = {name(number): pod(number, manifest=GANG.manifest(number, number)) for number in range(3)}
        for number in range(2):
            self.pods[name(number)]["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]

    def listing(self, *_, **__):
        return {"items": list(self.pods.values()), "metadata": {"resourceVersion": "1"}}

    def patch(self, kind, name, change):
        if self.failure:
            raise self.failure
        assert (kind, change) == ("Pod", {"metadata": {"annotations": {"kueue.x-k8s.io/retriable-in-group": "false"}}})
        self.over.append(name)

    def list(self, kind, **_):
        return list(self.pods.values()) if kind == "Pod" else []

    def delete(self, kind, name):
        assert name in self.over or name.endswith("2"), "it would stay"
        del self.pods[name]


def test_a_group_is_over_by_the_pods_that_kueue_keeps_or_a_line_in_the_log_says_what_helps(caplog):
    """Also where a user deletes the job, or a master gives it up."""
    WorkerPodApi(Kueue(NotThereError(404, "no such pod")), JOB).end_group()
    assert not caplog.records
    WorkerPodApi(Kueue(NotDoneError(403, "may not patch pods")), JOB).end_group()
    assert "`kubectl delete workload digits-workers`" in caplog.text
    cluster, pods = Kueue(), FakePods()
    namespace_job.wait_until_gone(cluster, JOB, {OWNERS[0]["uid"]})
    assert (cluster.over, cluster.pods) == ([name(0), name(1)], {})
    asyncio.run(cluster_master.end_workers(pods))
    assert pods.calls == [("end_group",), ("delete_all", 1)]


# ---- the watch ----

GONE = ApiError(410, "too old resource version")


@pytest.mark.parametrize(
    ("failure", "forgotten", "meanwhile"),
    [
        (ApiError(0, "connection reset"), False, "pod 0 fails -> 0 lost: crashed 3, ..."),
        (ValueError("no JSON"), True, "pod 0 fails -> 0 lost: crashed 3, ..."),
        (GONE, True, "pod 0 is gone -> 0 lost: deleted -9, somebody deleted pod ..."),
        (ApiError(400, "unknown version"), True, "pod 0 is gone -> 0 lost: deleted -9, somebody deleted pod ..."),
    ],
)
@on(scene())
async def test_what_happens_between_two_watches_is_told_once(scene, failure, forgotten, meanwhile):
    await happens(scene, "2 run")
    lists, (happening, following) = scene.pods.calls.count(("list",)), meanwhile.split(" -> ")
    with scene.pods.lock:
        scene.pods.interrupt(failure, forget=forgotten)
        await happens(scene, happening)
        if forgotten:
            scene.pods.history = []
            scene.pods.failures["watch"] = [failure if isinstance(failure, ApiError) else GONE]
    await play(scene, [f"-> {following}", "pod 1 is done -> 1 lost: clean 0, exit code 0"])
    assert (scene.pods.calls.count(("list",)) > lists) == forgotten


def test_delays_between_watches_begin_anew_once_one_has_told_something():
    said, pods = [], FakePods()
    backoff = SimpleNamespace(delay=lambda _: said.append("delay") or 0.0, reset=lambda: said.append("reset"))
    watch = Watch(pods, lambda _: pods.put(pod(0)), lambda *_: watch.stop(), backoff)
    pods.failures["watch"] = [ApiError(0, "connection reset")]
    watch.run()
    assert said == ["delay", "reset"]


@on(scene(leave=0.01, close=0.1))
async def test_a_pod_from_which_something_takes_labels_ends_the_job(scene):
    """As an admission webhook may: nobody would see what becomes of it."""
    bare = {"labels": {}}
    scene.pods.create = lambda made: scene.pods.made({**made, "metadata": {**made["metadata"], **bare}})
    scene.want(1)
    told = "failed: the cluster refuses the pods of the workers: something in the cluster takes labels or owners from "
    assert (await scene.next()).startswith(told)


# ---- how many requests a job makes, whatever the cluster does ----


@on(scene(first_retry=0.1, longest_retry=0.2))
async def test_all_workers_wait_for_a_quota_behind_one_back_off_and_follow_when_it_lets_one_in(scene):
    """And those that are launched one by one are asked for together: else it takes thousands minutes of the master's time."""
    scene.pods.quota = 2
    for most in range(1, 41):
        scene.want(most)
    assert scene.reports.empty()
    await scene.until(lambda: scene.reports.qsize() == 40 + 38)
    refused = sum(call[0] == "create" for call in scene.pods.calls) - 2
    assert refused <= 3, "one asks for all"
    assert "exceeded quota" in [told(scene.reports.get_nowait()) for _ in range(40 + 38)][-1]
    scene.pods.quota = None
    await scene.until(lambda: len(scene.pods.there) == 40)
    assert sum(call[0] == "create" for call in scene.pods.calls) <= 40 + refused + 3


@on(scene())
async def test_at_the_end_all_pods_are_deleted_though_other_requests_wait_for_their_turn(scene):
    await happens(scene, f"{REQUESTS_AT_ONCE + 1} run")
    delete, delete_all, may_go_on = scene.pods.delete, scene.pods.delete_all, threading.Event()
    scene.pods.delete = lambda *asked: may_go_on.wait(30) and delete(*asked)
    scene.pods.delete_all = lambda grace: (delete_all(grace), may_go_on.set())
    for number in range(REQUESTS_AT_ONCE):
        scene.places.give_back(name(number), at_once=True)
    await asyncio.wait_for(scene.places.close(), 10)
    assert may_go_on.is_set()
