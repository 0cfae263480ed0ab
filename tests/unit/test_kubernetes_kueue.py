"""The pods of a gang in a queue of Kueue's: never more than its size, and none is kept when the job is over."""

import asyncio
import logging

import pytest
from kubernetes_kit import JOB, NAMESPACE, OWNERS, RUNNING, FakePods, condition, name, pod, scene, terminated, told

from elasticdl.cli import namespace_job
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.client import ApiError, NotDoneError, NotThereError
from elasticdl.kube.manifests import worker_template
from elasticdl.master.shell import cluster_master
from elasticdl.places.worker_pods import WorkerPodApi, WorkerPods
from tests.stories import on

SIZE = 2
SPEC = JobSpec.model_validate(
    {"image": "i", "job_name": JOB, "gang": True, "queue": "kueue=train", "num_workers": str(SIZE)}
)
GANG = WorkerPods(
    JOB, NAMESPACE, OWNERS, worker_template(SPEC, NAMESPACE), lambda: WorkerRange(minimum=SIZE, maximum=SIZE)
)
PREEMPTED = condition(
    "TerminationTarget", "True", "WorkloadEvictedDueToPreempted", "Preempted to accommodate a workload"
)


@on(scene(GANG))
async def test_a_preempted_gang_asks_for_others_when_its_pods_are_over(scene):
    await scene.ready(SIZE)
    for number in range(SIZE):
        await scene.show(number, "Running", RUNNING, conditions=[PREEMPTED], deleted=True)
        assert (await scene.next()).startswith(f"{number} ending")
    scene.want(SIZE)
    await asyncio.sleep(0)
    assert scene.reports.empty(), "Kueue would delete it: those that leave count"
    for number, successor in ((1, 2), (0, 3)):
        await scene.show(number, "Failed", terminated(143), conditions=[PREEMPTED], deleted=True)
        assert (await scene.next()).startswith(f"{number} lost: preempted")
        scene.want(SIZE)
        assert told(await scene.reports.get()) == f"{successor} is asked for"


@pytest.mark.parametrize("failures", [1, 1000])
@on(scene(GANG))
async def test_a_job_that_ends_has_kueue_keep_none_of_its_pods(scene, failures):
    await scene.ready(SIZE)
    scene.pods.failures["end_group"] = [ApiError(503, "away")] * failures
    await scene.places.close()
    assert next(call[0] for call in scene.pods.calls if call[0] not in ("list", "watch", "create")) == "end_group"
    for number in range(SIZE):  # it ends whatever comes of that
        assert (await scene.next()).startswith(f"{number} lost")


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
        over = self.annotated()
        for each, made in list(self.pods.items()):
            if made["metadata"].get("deletionTimestamp") and (each in over or not made["metadata"].get("finalizers")):
                del self.pods[each]
        return found

    def delete(self, kind, name):
        self.pods[name]["metadata"]["deletionTimestamp"] = "now"

    def patch(self, kind, name, change):
        assert kind == "Pod"
        if self.failure:
            raise self.failure
        self.pods[name]["metadata"]["annotations"].update(change["metadata"]["annotations"])

    def annotated(self):
        annotations = {each: made["metadata"].get("annotations", {}) for each, made in self.pods.items()}
        return [each for each in annotations if annotations[each].get("kueue.x-k8s.io/retriable-in-group") == "false"]


def managed(number, template=GANG):
    made = pod(number, manifest=template.manifest(number, number))
    made["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    return made


def test_the_group_is_over_by_the_pods_that_kueue_keeps():
    replaced = managed(2)
    replaced["metadata"]["finalizers"] = []
    alone = worker_template(SPEC.model_copy(update={"gang": False}), NAMESPACE)
    single = managed(3, WorkerPods(JOB, NAMESPACE, OWNERS, alone, GANG.limits))
    cluster = Cluster(managed(0), managed(1), replaced, single)
    WorkerPodApi(cluster, JOB).end_group()
    assert cluster.annotated() == [name(0), name(1)]


def test_the_group_is_over_also_where_a_master_gives_the_job_up():
    """It has no launcher, which would see to that."""
    pods = FakePods()
    asyncio.run(cluster_master.end_workers(pods))
    assert pods.calls == [("end_group",), ("delete_all", 1)]


def test_where_pods_may_not_be_changed_a_line_in_the_log_says_what_helps(caplog):
    with caplog.at_level(logging.ERROR):
        WorkerPodApi(Cluster(managed(0), failure=NotDoneError(403, "may not patch pods")), JOB).end_group()
    assert "`kubectl delete workload digits-workers`" in caplog.text
    WorkerPodApi(Cluster(managed(0), failure=NotThereError(404, "no such pod")), JOB).end_group()


def test_deleting_a_gang_leaves_nothing(monkeypatch):
    monkeypatch.setattr(namespace_job, "POLL", 0.0)
    monkeypatch.setattr(namespace_job, "DELETION_TIMEOUT", 1.0)
    cluster = Cluster(managed(0), managed(1))
    namespace_job.wait_until_gone(cluster, JOB, {OWNERS[0]["uid"]})
    assert cluster.pods == {}
