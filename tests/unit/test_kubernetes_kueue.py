"""The pods of a gang in a queue of Kueue's: never more than its size, and none is kept when the job is over."""

import asyncio
import logging
import random

import pytest
from kubernetes_fake import FakeObjects, FakePods
from kubernetes_kit import JOB, NAMESPACE, OWNER, RUNNING, condition, pod, terminated

from elasticdl.cli.cluster import namespace_job
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.api_error import ApiError, NotDoneError
from elasticdl.kube.manifests.pod import worker_pod
from elasticdl.master.shell import cluster_master
from elasticdl.places.base import PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.pods.pod_places import PodPlaces, PodTimeouts
from elasticdl.places.pods.worker_pods import WorkerPodApi, WorkerPods

DEADLINE = 20.0
SIZE = 2
SPEC = JobSpec.model_validate(
    {"image": "i", "job_name": JOB, "gang": True, "queue": "kueue=train", "num_workers": str(SIZE)}
)
GANG = WorkerPods(JOB, NAMESPACE, OWNER, worker_pod(SPEC, NAMESPACE), lambda: WorkerRange(minimum=SIZE, maximum=SIZE))
PREEMPTED = condition(
    "TerminationTarget", "True", "WorkloadEvictedDueToPreempted", "Preempted to accommodate a workload"
)
NAMES = [f"{JOB}-worker-{number}" for number in range(2 * SIZE)]


class Pods(FakePods):
    def end_group(self):
        self._call("end_group")

    def show(self, number, phase, state, **more):
        known = self.objects.objects[NAMES[number]]
        made = pod(number, phase, state, manifest=known, **more)
        made["metadata"]["uid"] = known["metadata"]["uid"]
        self.objects.put(NAMES[number], made)


def play(story, timeouts):
    """``story`` gets places for the gang, all of which run; as many are wanted again after each report, as by a launcher."""

    async def whole():
        pods, reports, news = Pods(FakeObjects(), FakeObjects()), [], asyncio.Event()

        def report(what):
            reports.append(what)
            asyncio.get_running_loop().call_soon(wanted)

        def wanted():
            places.want(SIZE, frozenset())
            news.set()

        async def until(condition):
            async with asyncio.timeout(DEADLINE):
                while not condition(reports):
                    news.clear()
                    await news.wait()

        places = PodPlaces(pods, GANG, report, timeouts, random.Random(1))
        await places.found()
        wanted()
        async with asyncio.timeout(DEADLINE):
            while len(pods.objects.objects) < SIZE:
                await asyncio.sleep(0)
        for number in range(SIZE):
            pods.show(number, "Running", RUNNING)
        await until(lambda told: len(states(told, PlaceState.READY)) == SIZE)
        try:
            await story(places, pods, reports, until)
        finally:
            await places.close()

    asyncio.run(whole())


def states(reports, state):
    return [each.place.id for each in reports if isinstance(each, PlaceChanged) and each.place.state is state]


def lost(reports):
    return [each.place_id for each in reports if isinstance(each, PlaceLost)]


def asked_for(reports):
    return {each.place.id for each in reports if isinstance(each, PlaceChanged)}


def test_a_preempted_gang_asks_for_others_when_its_pods_are_over():
    async def story(_, pods, reports, until):
        for number in range(SIZE):
            pods.show(number, "Running", RUNNING, conditions=[PREEMPTED], deleted=True)
        await until(lambda told: len(states(told, PlaceState.ENDING)) == SIZE)
        assert asked_for(reports) == set(NAMES[:SIZE]), "Kueue would delete it: those that leave count"
        pods.show(1, "Failed", terminated(143), conditions=[PREEMPTED], deleted=True)
        await until(lost)
        assert asked_for(reports) == set(NAMES[: SIZE + 1])
        pods.show(0, "Failed", terminated(143), conditions=[PREEMPTED], deleted=True)
        await until(lambda told: asked_for(told) == set(NAMES))
        assert lost(reports) == [NAMES[1], NAMES[0]]

    play(story, PodTimeouts(leave=0.05))


@pytest.mark.parametrize("failures", [0, 1, 1000])
def test_a_job_that_ends_has_kueue_keep_none_of_its_pods(failures):
    async def story(places, pods, reports, _):
        pods.failures["end_group"] = [ApiError(503, "away")] * failures
        await places.close()
        made = [call[0] for call in pods.calls if call[0] != "create"]
        assert made[0] == "end_group"
        assert set(lost(reports)) == set(NAMES[:SIZE]), "it ends whatever comes of that"

    play(story, PodTimeouts(leave=0.05, first_retry=0.01, longest_retry=0.02))


class Cluster:
    """Pods of one job in memory; a failed one with Kueue's finalizer stays until its group is over."""

    namespace = NAMESPACE

    def __init__(self, *pods, failure=None):
        self.pods = {each["metadata"]["name"]: each for each in pods}
        self.failure = failure

    def listing(self, *_, **__):
        return {"items": list(self.pods.values()), "metadata": {"resourceVersion": "1"}}

    def list(self, kind, **_):
        found = list(self.pods.values()) if kind == "Pod" else []
        self.pods = {name: each for name, each in self.pods.items() if not self._goes(each)}
        return found

    @staticmethod
    def _goes(pod):
        over = pod["metadata"]["annotations"].get("kueue.x-k8s.io/retriable-in-group") == "false"
        return bool(pod["metadata"].get("deletionTimestamp")) and (over or not pod["metadata"].get("finalizers"))

    def delete(self, kind, name):
        self.pods[name]["metadata"]["deletionTimestamp"] = "now"

    def patch(self, kind, name, change):
        assert kind == "Pod"
        if self.failure:
            raise NotDoneError(*self.failure)
        self.pods[name]["metadata"]["annotations"].update(change["metadata"]["annotations"])

    def annotated(self):
        return [
            name
            for name, pod in self.pods.items()
            if pod["metadata"]["annotations"].get("kueue.x-k8s.io/retriable-in-group") == "false"
        ]


def managed(number, template=GANG):
    made = pod(number, manifest=template.manifest(number, number))
    made["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    return made


def test_the_group_is_over_by_the_pods_that_kueue_keeps():
    replaced = managed(2)
    replaced["metadata"]["finalizers"] = []
    alone = worker_pod(SPEC.model_copy(update={"gang": False}), NAMESPACE)
    single = managed(3, WorkerPods(JOB, NAMESPACE, OWNER, alone, GANG.limits))
    cluster = Cluster(managed(0), managed(1), replaced, single)
    WorkerPodApi(cluster, JOB).end_group()
    assert cluster.annotated() == NAMES[:2]


def test_the_group_is_over_also_where_a_master_gives_the_job_up():
    """It has no launcher, which would see to that."""
    pods = Pods(FakeObjects(), FakeObjects())
    asyncio.run(cluster_master.end_workers(pods))
    assert pods.calls == [("end_group",), ("delete_all", 1)]


def test_where_pods_may_not_be_changed_a_line_in_the_log_says_what_helps(caplog):
    forbidden = Cluster(managed(0), failure=(403, "may not patch pods"))
    with caplog.at_level(logging.ERROR):
        WorkerPodApi(forbidden, JOB).end_group()
    assert "`kubectl delete workload digits-workers`" in caplog.text
    gone = Cluster(managed(0), failure=(404, "no such pod"))
    WorkerPodApi(gone, JOB).end_group()


def test_deleting_a_gang_leaves_nothing(monkeypatch):
    monkeypatch.setattr(namespace_job, "POLL", 0.0)
    monkeypatch.setattr(namespace_job, "DELETION_TIMEOUT", 1.0)
    cluster = Cluster(managed(0), managed(1))
    namespace_job.wait_until_gone(cluster, JOB)
    assert cluster.pods == {}
