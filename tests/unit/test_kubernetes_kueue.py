"""The pods of a gang in a queue of Kueue's: never more than its size, and none is kept when the job is over."""

import asyncio
import logging

import pytest
from kubernetes_kit import JOB, NAMESPACE, OWNERS, FakePods, name, pod
from test_kubernetes_places import run

from elasticdl.cli import namespace_job
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.client import NotDoneError, NotThereError
from elasticdl.kube.manifests import worker_template
from elasticdl.master.shell import cluster_master
from elasticdl.places.worker_pods import WorkerPodApi, WorkerPods
from tests.stories import told_in

SIZE = 2
SPEC = JobSpec.model_validate(
    {"image": "i", "job_name": JOB, "gang": True, "queue": "kueue=train", "num_workers": str(SIZE)}
)
GANG = WorkerPods(
    JOB, NAMESPACE, OWNERS, worker_template(SPEC, NAMESPACE), lambda: WorkerRange(minimum=SIZE, maximum=SIZE)
)
STORIES = """
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


@pytest.mark.parametrize("story", list(told_in(STORIES)))
def test_what_becomes_of_a_gang(story):
    run(story[1:], workers=GANG)


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
