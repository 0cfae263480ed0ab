"""What pods and events say of workers, on clusters with and without the condition DisruptionTarget."""

import pytest
from kubernetes_kit import NAMESPACE, PODS, RUNNING, condition, event, pod, terminated, waiting

from elasticdl.job.quantities import Priority
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.manifests.pod import worker_pod
from elasticdl.master.state.events import ExitCause
from elasticdl.places.pods.judge import Ended, Running, Waiting, judge, judge_end
from elasticdl.places.pods.worker_pods import Owner, WorkerPods, index_of, number_of

UNSCHEDULABLE = condition(
    "PodScheduled", "False", "Unschedulable", "0/2 nodes are available:\n 2 Insufficient nvidia.com/gpu."
)
NOT_FOUND = 'rpc error: failed to pull and unpack image "i": not found'


@pytest.mark.parametrize(
    ("seen", "events", "image", "reason"),
    [
        (pod(node=""), [], False, "the scheduler has not looked at it yet"),
        (
            pod(node="", conditions=[UNSCHEDULABLE]),
            [],
            False,
            "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        ),
        (
            pod(node="", conditions=[condition("PodScheduled", "False", "SchedulingGated")]),
            [],
            False,
            "it waits in its queue",
        ),
        (pod(), [], False, "it is being started on node n0"),
        (pod(state=waiting("ContainerCreating")), [], False, "it is being started on node n0"),
        (
            pod(state=waiting("ContainerCreating")),
            [event("ErrWorkloadCompose", "'digits-workers' group has fewer runnable pods than expected", "Warning")],
            False,
            "it is being started on node n0",
        ),
        (
            pod(state=waiting("ContainerCreating")),
            [
                event("FailedScheduling", "0/2 nodes", "Warning"),
                event("Scheduled"),
                event("FailedMount", 'secret "digits-worker-tls" not found', "Warning"),
            ],
            False,
            'it can\'t be started on node n0: secret "digits-worker-tls" not found',
        ),
        (
            pod(state=waiting("ErrImagePull", NOT_FOUND)),
            [],
            True,
            f"the image can't be pulled: {NOT_FOUND}",
        ),
        (pod(state=waiting("InvalidImageName")), [], True, "the image can't be pulled: InvalidImageName"),
        (
            pod(initContainerStatuses=[{"name": "init", "state": waiting("ImagePullBackOff", "Back-off")}]),
            [],
            True,
            "the image can't be pulled: Back-off",
        ),
        (
            pod(state=waiting("CreateContainerConfigError", "couldn't find key x")),
            [],
            False,
            "its container can't be started on node n0: couldn't find key x",
        ),
    ],
)
def test_what_a_pod_waits_for(seen, events, image, reason):
    found = judge(seen, events, told=False)
    assert isinstance(found, Waiting)
    assert (found.image, found.reason) == (image, reason)


def test_a_pod_runs_when_its_container_does():
    assert judge(pod(phase="Running", state=RUNNING), [], told=False) == Running("n0")
    leaving = pod(phase="Running", state=RUNNING, deleted=True)
    assert judge(leaving, [event("Preempted")], told=False) == Running("n0")


PREEMPTED_BY = "Preempted by lab/urgent on node n0"
PREEMPTED = event(
    "Preempted",
    "Preempted by pod 5f2b on node n0",
    related={"kind": "Pod", "namespace": "lab", "name": "urgent", "uid": "5f2b"},
)
TAINTED = "Marking for deletion Pod lab/digits-worker-0"
KILLED_BY = "The node was low on resource: memory."


KUEUE_PREEMPTS = (
    "Preempted to accommodate a workload (UID: 9f542104-a9e2-4344-ad2e-9c136204da18, JobUID: a20d0a6a-64a3-46ce-9b95-8cfb3bf6e675) "
    "due to prioritization in the ClusterQueue; preemptor path: /train; preemptee path: /train"
)


def stopped(why, text, **more):
    """As Kueue stops a pod: first the condition, then the deletion."""
    return pod(phase="Succeeded", conditions=[condition("TerminationTarget", "True", why, text)], deleted=True, **more)


def disrupted(why, text, **more):
    return pod(phase="Failed", conditions=[condition("DisruptionTarget", "True", why, text)], deleted=True, **more)


@pytest.mark.parametrize(
    ("last", "events", "gone", "cause", "code", "detail"),
    [
        # A condition says it, and who preempted it the event.
        (
            disrupted("PreemptionByScheduler", "preempting to accommodate a higher priority pod", state=terminated(0)),
            [],
            False,
            ExitCause.PREEMPTED,
            0,
            "preempting to accommodate a higher priority pod",
        ),
        (
            disrupted("PreemptionByScheduler", "preempting to accommodate a higher priority pod", state=terminated(0)),
            [PREEMPTED, event("Killing", "Stopping container elasticdl")],
            True,
            ExitCause.PREEMPTED,
            0,
            "Preempted by pod lab/urgent on node n0",
        ),
        (
            disrupted("PreemptionByKubeScheduler", "x", state=terminated(137)),
            [],
            True,
            ExitCause.PREEMPTED,
            137,
            "x",
        ),
        (
            disrupted("EvictionByEvictionAPI", "Eviction API: evicting", state=terminated(143)),
            [],
            False,
            ExitCause.EVICTED,
            143,
            "Eviction API: evicting",
        ),
        (
            disrupted("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint", state=terminated(0)),
            [],
            False,
            ExitCause.EVICTED,
            0,
            "Taint manager: deleting due to NoExecute taint",
        ),
        (
            disrupted("DeletionByTaintManager", "Taint manager: deleting", state=RUNNING),
            [],
            True,
            ExitCause.NODE_LOST,
            -9,
            "Taint manager: deleting",
        ),
        (
            disrupted("DeletionByPodGC", "PodGC: node no longer exists", state=RUNNING),
            [],
            True,
            ExitCause.NODE_LOST,
            -9,
            "PodGC: node no longer exists",
        ),
        (
            disrupted("TerminationByKubelet", KILLED_BY, state=terminated(137), reason="Evicted", message=KILLED_BY),
            [],
            False,
            ExitCause.EVICTED,
            137,
            KILLED_BY,
        ),
        # Kueue's own condition, in newer releases and in older ones.
        (
            stopped("WorkloadEvictedDueToPreempted", KUEUE_PREEMPTS, state=terminated(0)),
            [event("Stopped", KUEUE_PREEMPTS), event("Killing", "Stopping container elasticdl")],
            False,
            ExitCause.PREEMPTED,
            0,
            f"Kueue: {KUEUE_PREEMPTS}",
        ),
        (
            stopped("WorkloadEvicted", KUEUE_PREEMPTS, state=terminated(0)),
            [],
            True,
            ExitCause.PREEMPTED,
            0,
            f"Kueue: {KUEUE_PREEMPTS}",
        ),
        (
            stopped("WorkloadEvictedDueToClusterQueueStopped", "The ClusterQueue is stopped", state=terminated(0)),
            [],
            False,
            ExitCause.EVICTED,
            0,
            "Kueue: The ClusterQueue is stopped",
        ),
        (
            stopped("WorkloadDeleted", "", state=terminated(0)),
            [],
            False,
            ExitCause.EVICTED,
            0,
            "Kueue: WorkloadDeleted",
        ),
        (
            pod(deleted=True, node=""),
            [event("ExcessPodDeleted", "Excess pod deleted")],
            True,
            ExitCause.EVICTED,
            -9,
            "Excess pod deleted",
        ),
        # Without the condition: the pod's own reason, the events about it, what its node last told.
        (
            pod(phase="Running", state=terminated(0), deleted=True),
            [event("Scheduled"), event("Preempted", PREEMPTED_BY), event("Killing", "Stopping container elasticdl")],
            True,
            ExitCause.PREEMPTED,
            0,
            PREEMPTED_BY,
        ),
        (
            pod(phase="Failed", reason="Preempting", message="Preempted in order to admit critical pod"),
            [],
            False,
            ExitCause.PREEMPTED,
            -9,
            "Preempted in order to admit critical pod",
        ),
        (
            pod(phase="Failed", reason="Evicted", message=KILLED_BY),
            [],
            False,
            ExitCause.EVICTED,
            -9,
            KILLED_BY,
        ),
        (
            pod(phase="Failed", reason="OutOfnvidia.com/gpu", message="Node didn't have enough resource"),
            [],
            False,
            ExitCause.EVICTED,
            -9,
            "Node didn't have enough resource",
        ),
        (
            pod(phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed"),
            [],
            False,
            ExitCause.EVICTED,
            -9,
            "Allocate failed",
        ),
        (
            pod(phase="Running", state=RUNNING, reason="NodeLost", message="Node n0 is unresponsive", deleted=True),
            [],
            True,
            ExitCause.NODE_LOST,
            -9,
            "Node n0 is unresponsive",
        ),
        (
            pod(phase="Running", state=RUNNING, deleted=True, conditions=[condition("Ready", "False")]),
            [event("NodeNotReady", "Node is not ready", "Warning")],
            True,
            ExitCause.NODE_LOST,
            -9,
            "node n0 does not answer",
        ),
        (
            pod(phase="Running", state=RUNNING, deleted=True),
            [event("TaintManagerEviction", TAINTED)],
            True,
            ExitCause.NODE_LOST,
            -9,
            "node n0 got a taint that it does not tolerate",
        ),
        (
            pod(phase="Succeeded", state=terminated(0), deleted=True),
            [event("TaintManagerEviction", TAINTED)],
            False,
            ExitCause.EVICTED,
            0,
            "node n0 got a taint that it does not tolerate",
        ),
        (
            pod(phase="Running", state=terminated(137), deleted=True),
            [event("TaintManagerEviction", "Cancelling deletion of Pod lab/digits-worker-0")],
            True,
            ExitCause.DELETED,
            137,
            "somebody deleted pod digits-worker-0",
        ),
        # Any cluster.
        (
            pod(phase="Running", state=RUNNING, deleted=True, conditions=[condition("Ready")]),
            [],
            True,
            ExitCause.DELETED,
            -9,
            "somebody deleted pod digits-worker-0",
        ),
        (
            pod(phase="Succeeded", state=terminated(0)),
            [],
            False,
            ExitCause.CLEAN,
            0,
            "exit code 0",
        ),
        (
            pod(phase="Failed", state=terminated(3)),
            [],
            False,
            ExitCause.CRASHED,
            3,
            f"exit code 3; its log: kubectl logs -n {NAMESPACE} digits-worker-0",
        ),
        (
            pod(phase="Failed", state=terminated(139)),
            [],
            False,
            ExitCause.CRASHED,
            139,
            f"SIGSEGV; its log: kubectl logs -n {NAMESPACE} digits-worker-0",
        ),
        (pod(phase="Failed", state=terminated(137)), [], False, ExitCause.KILLED, 137, "SIGKILL"),
        (
            pod(phase="Failed", state=terminated(137, "OOMKilled")),
            [],
            False,
            ExitCause.OUT_OF_MEMORY,
            137,
            "its node was out of memory",
        ),
        (
            pod(phase="Failed", state=terminated(137, "OOMKilled"), deleted=True),
            [event("Preempted")],
            True,
            ExitCause.OUT_OF_MEMORY,
            137,
            "its node was out of memory",
        ),
        (
            pod(phase="Failed", state=terminated(128, "StartError", 'exec: "python": not found')),
            [],
            False,
            ExitCause.CRASHED,
            128,
            'can\'t start it: exec: "python": not found',
        ),
        (
            pod(phase="Failed", reason="SomethingNew", message="who knows"),
            [],
            False,
            ExitCause.CRASHED,
            1,
            "who knows",
        ),
    ],
)
def test_why_a_worker_ended(last, events, gone, cause, code, detail):
    ended = judge_end(last, events, told=False, gone=gone) if gone else judge(last, events, told=False)
    assert isinstance(ended, Ended)
    assert (ended.cause, ended.code, ended.detail) == (cause, code, detail)


def test_a_preemption_is_open_until_it_is_told_who_came():
    last = disrupted("PreemptionByScheduler", "x", state=terminated(0))
    assert [judge(last, events, told=False).open for events in ([], [PREEMPTED])] == [True, False]
    evicted = disrupted("EvictionByEvictionAPI", "x", state=terminated(0))
    assert not judge(evicted, [], told=False).open
    by_kueue = stopped("WorkloadEvictedDueToPreempted", KUEUE_PREEMPTS, state=terminated(0))
    assert not judge(by_kueue, [], told=False).open, "Kueue has said all that it says"


def test_what_we_had_deleted_is_killed_unless_the_cluster_was_first():
    last = pod(phase="Running", state=terminated(0), deleted=True)
    assert judge_end(last, [], told=True, gone=True) == Ended(ExitCause.KILLED, 0, "as told")
    assert judge_end(last, [event("Preempted", "x")], told=True, gone=True).cause is ExitCause.PREEMPTED
    assert judge_end(pod(node=""), [], told=True, gone=True).detail == "it had no place yet"


def test_the_end_of_the_log_of_a_failed_worker_comes_with_its_status():
    assert judge(pod(phase="Failed", state=terminated(1, message="a\nb\n")), [], told=False).output == "a\nb\n"


def test_memory_is_named_with_its_limit():
    limited = pod(phase="Failed", state=terminated(137, "OOMKilled"))
    limited["spec"]["containers"][0] = {"name": "elasticdl", "resources": {"limits": {"memory": "2Gi"}}}
    assert judge(limited, [], told=False).detail == "it took more memory than its limit of 2Gi"


def test_a_pod_with_further_containers_is_over_when_the_worker_is():
    last = pod(phase="Running", state=terminated(0))
    assert isinstance(judge(last, [], told=False), Waiting)  # its node has not finished telling
    last["spec"]["containers"] = [*last["spec"]["containers"], {"name": "sidecar"}]
    assert judge(last, [], told=False).cause is ExitCause.CLEAN


def test_a_workers_pod():
    made = PODS.manifest(7, 2)
    assert made["metadata"]["name"] == "digits-worker-7"
    assert made["metadata"]["namespace"] == NAMESPACE
    assert (number_of(made), index_of(made)) == (7, 2)
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "digits-master", "uid": "owner-uid"}
    ]
    assert made["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert "priorityClassName" not in made["spec"]
    assert PODS.owns(made)
    assert not PODS.owns({"metadata": {**made["metadata"], "ownerReferences": [{"uid": "other"}]}})
    assert not PODS.owns({"metadata": {**made["metadata"], "ownerReferences": None}})


def test_a_worker_has_a_controller_if_the_jobs_state_goes_with_the_job():
    """Else `kubectl drain` refuses it; and it would outlive its job if what controls it did."""
    job = {"metadata": {"name": "digits-master", "uid": "j"}}
    state = {"metadata": {"uid": "s", "ownerReferences": [{"uid": "j"}]}}
    owner, controller = Owner.of(job, state).references("digits")
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "digits-master", "uid": "j"}
    assert controller == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "digits-state",
        "uid": "s",
        "controller": True,
    }
    for alone in ({"metadata": {"uid": "s"}}, {"metadata": {"uid": "s", "ownerReferences": [{"uid": "other"}]}}):
        assert Owner.of(job, alone).references("digits") == [owner]


@pytest.mark.parametrize(
    ("priority", "urgent"),
    [
        (Priority("high"), 4),
        (Priority("high", 0.5), 2),
        (Priority("high", 0.3), 2),
        (Priority("high", 0.25), 1),
        (Priority("high", 0), 0),
    ],
)
def test_the_first_places_are_urgent(priority, urgent):
    pods = WorkerPods(PODS.job, PODS.namespace, PODS.owner, PODS.template, limits=PODS.limits, priority=priority)
    classes = [pods.manifest(10 + place, place)["spec"].get("priorityClassName") for place in range(5)]
    assert classes == ["high"] * urgent + [None] * (5 - urgent)


def test_the_share_of_urgent_places_is_that_of_the_range_which_the_job_has_now():
    limits = WorkerRange(minimum=1, maximum=4)
    priority = Priority("high", 0.5)
    pods = WorkerPods(PODS.job, PODS.namespace, PODS.owner, PODS.template, limits=lambda: limits, priority=priority)
    assert pods.urgent == 2
    limits = WorkerRange(minimum=1, maximum=10)
    assert pods.urgent == 5


def test_a_worker_may_be_kept_from_nodes_and_the_users_own_affinity_stays():
    own = {"podAntiAffinity": {"x": 1}, "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["first"]}}
    template = {**PODS.template, "spec": {**PODS.template["spec"], "affinity": own}}
    pods = WorkerPods(PODS.job, PODS.namespace, PODS.owner, template, limits=PODS.limits)
    assert pods.manifest(1, 0)["spec"]["affinity"] == own
    made = pods.manifest(1, 0, ("node-b", "node-c"))["spec"]["affinity"]
    assert made["podAntiAffinity"] == {"x": 1}
    first, avoiding = made["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert first == "first"
    assert avoiding["preference"]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": ["node-b"]},
        {
            "key": "metadata.name",
            "operator": "NotIn",
            "values": ["node-c"],
        },  # a field may be compared with one value only
    ]
    assert own["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == ["first"]
    assert "affinity" not in PODS.manifest(1, 0)["spec"]


def test_the_pods_of_a_kueue_gang_are_alike_whichever_node_one_is_to_avoid():
    spec = JobSpec.model_validate({"image": "i", "job_name": "digits", "gang": True, "queue": "kueue=a"})
    pods = WorkerPods(PODS.job, PODS.namespace, PODS.owner, worker_pod(spec, "lab"), limits=PODS.limits)
    assert "affinity" not in pods.manifest(1, 0, ("node-b",))["spec"]
