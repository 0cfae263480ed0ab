"""What pods say of workers, with and without the condition DisruptionTarget."""

from datetime import UTC, datetime, timedelta

import pytest
from kubernetes_kit import NAMESPACE, PODS, RUNNING, condition, pod, terminated, waiting

from elasticdl.job.quantities import Priority
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.manifests import worker_template
from elasticdl.master.core.events import ExitCause
from elasticdl.places.judge import (
    MOST_CRASHES,
    SOON_SECONDS,
    Ended,
    Waiting,
    crash_loop,
    judge_end,
    judge_pod,
    last_crashes,
)
from elasticdl.places.worker_pods import WorkerPods, index_of, number_of, owner_references

NO_ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
UNSCHEDULABLE = condition("PodScheduled", "False", "Unschedulable", NO_ROOM.replace(": ", ":\n "))
GATED = condition("PodScheduled", "False", "SchedulingGated")


def group(text):
    """As Volcano 1.15.1 says of each pod of a group."""
    return condition("PodScheduled", "False", "Unschedulable", f"pod group is {text}")


NO_QUOTA = group("ready, 1 Pending, 1 minAvailable, 3 Running; Pending: 1 Unschedulable")
NO_GANG = group(
    f"not ready, 2 Pending, 2 minAvailable; Pending: 2 Unschedulable. Origin reason is digits-worker-1: {NO_ROOM}"
)
OF_VOLCANO = PODS.manifest(0, 0)
OF_VOLCANO = {**OF_VOLCANO, "spec": {**OF_VOLCANO["spec"], "schedulerName": "volcano"}}
CREATING, STARTS = waiting("ContainerCreating"), "it is being started on node n0"
NO_PAPERS = 'secret "digits-worker-tls" not found'
PULLED = [{"name": "init", "state": waiting("ImagePullBackOff", "Back-off")}]
NO_KEY = waiting("CreateContainerConfigError", "couldn't find key x")


@pytest.mark.parametrize(
    ("seen", "warning", "image", "reason"),
    [
        (pod(node=""), "", False, "the scheduler has not looked at it yet"),
        (pod(node="", conditions=[UNSCHEDULABLE]), "", False, NO_ROOM),
        (pod(node="", conditions=[GATED]), "", False, "it waits in its queue"),
        (pod(node="", conditions=[NO_QUOTA]), "", False, "it waits in its queue"),
        (pod(node="", conditions=[NO_GANG]), "", False, f"it waits in its queue: {NO_ROOM}"),
        (pod(node="", manifest=OF_VOLCANO), "", False, "the scheduler volcano has not looked at it yet"),
        (pod(), "", False, STARTS),
        (pod(state=CREATING), "", False, STARTS),
        (pod(state=CREATING), NO_PAPERS, False, f"it can't be started on node n0: {NO_PAPERS}"),
        (pod(state=waiting("ErrImagePull", "not found")), "", True, "the image can't be pulled: not found"),
        (pod(initContainerStatuses=PULLED), "", True, "the image can't be pulled: Back-off"),
        (pod(state=NO_KEY), "", False, "its container can't be started on node n0: couldn't find key x"),
    ],
)
def test_what_a_pod_waits_for(seen, warning, image, reason):
    found = judge_pod(seen, told=False, warning=warning)
    assert isinstance(found, Waiting)
    assert (found.image, found.reason) == (image, reason)


ROOT = "container has runAsNonRoot and image will run as root"
USER = "container's runAsUser breaks non-root policy"
ABOUT = '(pod: "digits-master-x_lab(1)", container: elasticdl)'
NO_PULL, AS_ROOT = "the image can't be pulled: ", "nothing may run as root here: "
REMEDY = "end the image's Dockerfile with `USER 1000`, or give such a spec.securityContext.runAsUser in --pod_template"


@pytest.mark.parametrize(
    ("reason", "message", "told", "lasting"),
    [
        ("ErrImagePull", "no\nsuch", f"{NO_PULL}no such", False),
        ("ImagePullBackOff", None, f"{NO_PULL}ImagePullBackOff", False),
        ("InvalidImageName", "", f"{NO_PULL}InvalidImageName", True),
        ("CreateContainerConfigError", f"{ROOT} {ABOUT}", f"{AS_ROOT}{ROOT}; {REMEDY}", True),
        ("CreateContainerConfigError", f"{USER} {ABOUT}", f"{AS_ROOT}{USER}; {REMEDY}", True),
        ("CreateContainerConfigError", 'secret "a" not found', None, False),
        ("ContainerCreating", None, None, False),
    ],
)
def test_what_is_wrong_with_an_image(reason, message, told, lasting):
    found = judge_pod(pod(state=waiting(reason, message)), told=False)
    assert (found.reason if found.image else None, found.lasting) == (told, lasting)


def test_a_pod_runs_when_its_container_does():
    assert judge_pod(pod(phase="Running", state=RUNNING), told=False) is None
    leaving = pod(phase="Running", state=RUNNING, deleted=True)
    assert judge_pod(leaving, told=False) is None


DELETED = "somebody deleted pod digits-worker-0"
LOW, SILENT, UNREADY = "The node was low on resource: memory.", "Node n0 is unresponsive", condition("Ready", "False")
KUEUE_PREEMPTS = (
    "Preempted to accommodate a workload (UID: 9f542104-a9e2-4344-ad2e-9c136204da18, JobUID: a20d0a6a-64a3-46ce-9b95-8cfb3bf6e675) "
    "due to prioritization in the ClusterQueue; preemptor path: /train; preemptee path: /train"
)


def stopped(why, text):
    """As Kueue stops a pod: first the condition, then the deletion."""
    told = condition("TerminationTarget", "True", why, text)
    return pod(phase="Succeeded", state=terminated(0), conditions=[told], deleted=True)


def disrupted(why, text="x", state=None, **more):
    told = condition("DisruptionTarget", "True", why, text)
    return pod(phase="Failed", state=state or terminated(0), conditions=[told], deleted=True, **more)


def running(**more):
    """The last that was seen of one that is gone."""
    return pod(phase="Running", state=RUNNING, deleted=True, **more)


def failed(state, **more):
    return pod(phase="Failed", state=state, **more)


def refused(reason, message):
    return pod(phase="Failed", reason=reason, message=message)


C = ExitCause
LOG = f"its log: kubectl logs -n {NAMESPACE} digits-worker-0"
BY_PRIORITY = disrupted("PreemptionByScheduler", "for one of a higher priority")
BY_VOLCANO = disrupted("PreemptionByScheduler", "volcano: preempting to accommodate a higher priority pod")
BY_KUEUE, OOM = stopped("WorkloadEvictedDueToPreempted", KUEUE_PREEMPTS), terminated(137, "OOMKilled")
LIKE_A_LEAVING_ONE = pod(phase="Running", state=terminated(0), deleted=True)


@pytest.mark.parametrize(
    ("last", "gone", "cause", "code", "detail"),
    [
        # A condition says it.
        (BY_PRIORITY, False, C.PREEMPTED, 0, "for one of a higher priority"),
        (disrupted("EvictionByEvictionAPI", state=terminated(143)), False, C.EVICTED, 143, "x"),
        (disrupted("DeletionByTaintManager"), False, C.EVICTED, 0, "x"),
        (disrupted("DeletionByTaintManager", state=RUNNING), True, C.NODE_LOST, -9, "x"),
        (disrupted("DeletionByPodGC", state=RUNNING), True, C.NODE_LOST, -9, "x"),
        (disrupted("TerminationByKubelet", LOW, terminated(137), reason="Evicted"), False, C.EVICTED, 137, LOW),
        # Kueue's own condition.
        (BY_KUEUE, False, C.PREEMPTED, 0, f"Kueue: {KUEUE_PREEMPTS}"),
        (stopped("WorkloadEvictedDueToClusterQueueStopped", "x"), False, C.EVICTED, 0, "Kueue: x"),
        (stopped("WorkloadDeleted", ""), False, C.EVICTED, 0, "Kueue: WorkloadDeleted"),
        (BY_VOLCANO, False, C.PREEMPTED, 0, "volcano: preempting to accommodate a higher priority pod"),
        # Without the condition: the pod's own reason, and what its node last told.
        (refused("SysctlForbidden", "forbidden sysctl"), False, C.CRASHED, -9, "forbidden sysctl"),
        (refused("Preempting", "for a critical pod"), False, C.PREEMPTED, -9, "for a critical pod"),
        (refused("Evicted", LOW), False, C.EVICTED, -9, LOW),
        (refused("OutOfnvidia.com/gpu", "not enough"), False, C.EVICTED, -9, "not enough"),
        (refused("UnexpectedAdmissionError", "Allocate failed"), False, C.EVICTED, -9, "Allocate failed"),
        (running(reason="NodeLost", message=SILENT), True, C.NODE_LOST, -9, SILENT),
        (running(conditions=[UNREADY]), True, C.NODE_LOST, -9, "node n0 does not answer"),
        (pod(phase="Running", state=terminated(137), deleted=True), True, C.DELETED, 137, DELETED),
        # Any cluster.
        (running(conditions=[condition("Ready")]), True, C.DELETED, -9, DELETED),
        (pod(phase="Succeeded", state=terminated(0)), False, C.CLEAN, 0, "exit code 0"),
        (failed(terminated(3)), False, C.CRASHED, 3, f"exit code 3; {LOG}"),
        (failed(terminated(139)), False, C.CRASHED, 139, f"SIGSEGV; {LOG}"),
        (failed(terminated(137)), False, C.KILLED, 137, "SIGKILL"),
        (failed(OOM), False, C.OUT_OF_MEMORY, 137, "its node was out of memory"),
        (failed(OOM, deleted=True), True, C.OUT_OF_MEMORY, 137, "its node was out of memory"),
        (failed(terminated(128, "StartError", "no python")), False, C.CRASHED, 128, "can't start it: no python"),
        (refused("SomethingNew", "who knows"), False, C.EVICTED, -9, "who knows"),
    ],
)
def test_why_a_worker_ended(last, gone, cause, code, detail):
    ended = judge_end(last, told=False, gone=gone) if gone else judge_pod(last, told=False)
    assert isinstance(ended, Ended)
    assert (ended.cause, ended.code, ended.detail) == (cause, code, detail)


def test_what_we_had_deleted_is_killed_unless_the_cluster_was_first():
    last = LIKE_A_LEAVING_ONE
    assert judge_end(last, told=True, gone=True) == Ended(ExitCause.KILLED, 0, "as told")
    assert judge_end(BY_PRIORITY, told=True, gone=True).cause is ExitCause.PREEMPTED
    assert judge_end(pod(node=""), told=True, gone=True).detail == "it had no place yet"


def test_the_end_of_the_log_of_a_failed_worker_comes_with_its_status():
    assert judge_pod(failed(terminated(1, message="a\nb\n")), told=False).output == "a\nb\n"


def test_memory_is_named_with_its_limit():
    limited = failed(terminated(137, "OOMKilled"))
    limited["spec"]["containers"][0] = {"name": "elasticdl", "resources": {"limits": {"memory": "2Gi"}}}
    assert judge_pod(limited, told=False).detail == "it took more memory than its limit of 2Gi"


def test_a_pod_with_further_containers_is_over_when_the_worker_is():
    last = pod(phase="Running", state=terminated(0))
    assert isinstance(judge_pod(last, told=False), Waiting)  # its node has not finished telling
    last["spec"]["containers"] = [*last["spec"]["containers"], {"name": "sidecar"}]
    assert judge_pod(last, told=False).cause is ExitCause.CLEAN


def test_a_workers_pod():
    made = PODS.manifest(7, 2)
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("digits-worker-7", NAMESPACE)
    assert (number_of(made), index_of(made)) == (7, 2)
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "digits-master", "uid": "owner-uid"}
    ]
    assert made["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert PODS.owns(made)
    for others in ([{"uid": "other"}], None):
        assert not PODS.owns({"metadata": {**made["metadata"], "ownerReferences": others}})


def test_a_worker_has_a_controller_if_the_jobs_state_goes_with_the_job():
    """Else `kubectl drain` refuses it; and it would outlive its job if what controls it did."""
    job = {"metadata": {"name": "digits-master", "uid": "j"}}
    state = {"metadata": {"name": "digits-state", "uid": "s", "ownerReferences": [{"uid": "j"}]}}
    owner, controller = owner_references(job, state)
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "digits-master", "uid": "j"}
    of_state = {"apiVersion": "v1", "kind": "ConfigMap", "name": "digits-state", "uid": "s"}
    assert controller == {**of_state, "controller": True}
    for alone in ({"metadata": {"uid": "s"}}, {"metadata": {"uid": "s", "ownerReferences": [{"uid": "other"}]}}):
        assert owner_references(job, alone) == [owner]


def workers(template=PODS.template, priority=None, limits=PODS.limits):
    return WorkerPods(PODS.job, PODS.namespace, PODS.owners, template, limits=limits, priority=priority)


@pytest.mark.parametrize(("share", "urgent"), [(1.0, 4), (0.5, 2), (0.3, 2), (0.25, 1), (0, 0)])
def test_the_first_places_are_urgent_a_share_of_the_range_which_the_job_has_now(share, urgent):
    limits = WorkerRange(minimum=1, maximum=4)
    pods = workers(priority=Priority("high", share), limits=lambda: limits)
    classes = [pods.manifest(10 + place, place)["spec"].get("priorityClassName") for place in range(5)]
    assert classes == ["high"] * urgent + [None] * (5 - urgent)
    limits = WorkerRange(minimum=1, maximum=40)
    assert pods.urgent == 40 * share


def test_a_worker_may_be_kept_from_nodes_and_the_users_own_affinity_stays():
    own = {"podAntiAffinity": {"x": 1}, "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["first"]}}
    pods = workers({**PODS.template, "spec": {**PODS.template["spec"], "affinity": own}})
    made = pods.manifest(1, 0, ("node-b", "node-c"))["spec"]["affinity"]
    assert made["podAntiAffinity"] == {"x": 1}
    first, avoiding = made["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert first == "first"
    assert avoiding["preference"]["matchFields"] == [  # a field may be compared with one value only
        {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node-b", "node-c")
    ]
    assert pods.manifest(1, 0)["spec"]["affinity"] == own
    assert "affinity" not in PODS.manifest(1, 0)["spec"]


def test_the_pods_of_a_kueue_gang_are_alike_whichever_node_one_is_to_avoid():
    spec = JobSpec.model_validate({"image": "i", "job_name": "digits", "gang": True, "queue": "kueue=a"})
    assert "affinity" not in workers(worker_template(spec, "lab")).manifest(1, 0, ("node-b",))["spec"]


# When another master is of no use any more: what earlier ones have left decides.

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def master(number, code=1, seconds=3.0, *, job="job", **more):
    """The pod of the master that was started as the so-manieth."""
    state = terminated(code, message="Traceback\nRuntimeError: out of luck", **more)
    started = BEGIN + timedelta(hours=number)
    times = {"startedAt": started, "finishedAt": started + timedelta(seconds=seconds)}
    state["terminated"].update({key: f"{time:%Y-%m-%dT%H:%M:%SZ}" for key, time in times.items()})
    return {
        "metadata": {"name": f"m-{number}", "namespace": "lab", "ownerReferences": [{"uid": job}]},
        "spec": {"containers": [{"name": "elasticdl"}], "nodeName": "n"},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "elasticdl", "state": state}]},
    }


def masters(count=MOST_CRASHES, **more):
    return [master(number, **more) for number in range(count)]


def test_masters_that_crash_again_and_again_are_enough():
    assert crash_loop(last_crashes(reversed(masters()), "job")) == (
        f"its master crashed {MOST_CRASHES} times in a row: RuntimeError: out of luck, exit code 1; "
        f"its log: kubectl logs -n lab m-{MOST_CRASHES - 1}"
    )
    assert crash_loop(last_crashes(masters(reason="OOMKilled", code=137), "job"))


LOST = {"metadata": {"name": "lost", "ownerReferences": [{"uid": "job"}]}, "spec": {}, "status": {"phase": "Failed"}}
AT_WORK = {"phase": "Running", "containerStatuses": [{"name": "elasticdl", "state": {"running": {}}}]}
MASTER_RUNS = {**LOST, "status": AT_WORK}


@pytest.mark.parametrize(
    "seen",
    [
        [],
        masters(MOST_CRASHES - 1),
        masters(100, code=143),  # told to leave
        masters(100, code=137),  # killed
        masters(100, seconds=SOON_SECONDS),
        masters(100, job="one of the same name, before"),
        [*masters(MOST_CRASHES - 1), master(50, seconds=86400), *masters(0)],
        [*masters(), master(50, code=143)],
        [LOST] * 100,
        [MASTER_RUNS],
    ],
    ids=["none", "few", "left", "killed", "late", "another job", "one at work", "one that left", "lost", "running"],
)
def test_anything_else_has_another_master_started(seen):
    assert crash_loop(last_crashes(seen, "job")) == ""
