"""What pods say of workers, with and without the condition DisruptionTarget."""

from datetime import UTC, datetime, timedelta

import pytest
from kubernetes_kit import NAMESPACE, PODS, RUNNING, condition, pod, terminated, waiting

from elasticdl.job.quantities import Priority
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.kube.manifests import worker_template
from elasticdl.master.core.events import ExitCause
from elasticdl.places import judge
from elasticdl.places.judge import MOST_CRASHES, Ended, Waiting, crash_loop, judge_end, judge_pod, last_crashes
from elasticdl.places.worker_pods import WorkerPods, index_of, number_of, owner_references

C = ExitCause
NO_ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
# As Volcano 1.15.1 says of each pod of a group.
NO_QUOTA = "pod group is ready, 1 Pending, 1 minAvailable, 3 Running; Pending: 1 Unschedulable"
NO_GANG = "pod group is not ready, 2 Pending, 2 minAvailable; Pending: 2 Unschedulable. Origin reason is digits-1: "
OF_VOLCANO = {**PODS.manifest(0, 0), "spec": {**PODS.manifest(0, 0)["spec"], "schedulerName": "volcano"}}
PULLED = [{"name": "init", "state": waiting("ImagePullBackOff", "Back-off")}]
ROOT = "container has runAsNonRoot and image will run as root"
USER = "container's runAsUser breaks non-root policy"
REMEDY = "end the image's Dockerfile with `USER 1000`, or give such a spec.securityContext.runAsUser in --pod_template"
LOW, SILENT = "The node was low on resource: memory.", "Node n0 is unresponsive"


def unplaced(message, reason="Unschedulable"):
    return pod(node="", conditions=[condition("PodScheduled", "False", reason, message)])


def wrong(reason, message=None):
    return pod(state=waiting(reason, message))


def stops(why, **more):
    return Waiting(why, node="n0", **more)


def as_root(said):
    return stops(f"nothing may run as root here: {said}; {REMEDY}", image=True, lasting=True)


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


def failed(state=None, **more):
    return pod(phase="Failed", state=state, **more)


def of(*containers, **more):
    """A pod with these containers."""
    made = pod(**more)
    made["spec"]["containers"] = [{"name": "elasticdl", **containers[0]}, *containers[1:]]
    return made


LOG = f"its log: kubectl logs -n {NAMESPACE} digits-worker-0"
OOM = terminated(137, "OOMKilled")
LIMITED = of({"resources": {"limits": {"memory": "2Gi"}}}, phase="Failed", state=OOM)
NO_MEMORY = Ended(C.OUT_OF_MEMORY, 137, "its node was out of memory")
BY_PRIORITY = disrupted("PreemptionByScheduler", "for one of a higher priority")
DELETED = "somebody deleted pod digits-worker-0"


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        # What it waits for.
        (pod(node=""), Waiting("the scheduler has not looked at it yet")),
        (unplaced(NO_ROOM.replace(": ", ":\n ")), Waiting(NO_ROOM)),
        (unplaced("", "SchedulingGated"), Waiting("it waits in its queue")),
        (unplaced(NO_QUOTA), Waiting("it waits in its queue")),
        (unplaced(NO_GANG + NO_ROOM), Waiting(f"it waits in its queue: {NO_ROOM}")),
        (pod(node="", manifest=OF_VOLCANO), Waiting("the scheduler volcano has not looked at it yet")),
        (wrong("ContainerCreating"), stops("it is being started on node n0")),
        (wrong("CreateContainerConfigError", "no key x"), stops("its container can't be started on node n0: no key x")),
        # What is wrong with its image.
        (wrong("ErrImagePull", "no\nsuch"), stops("the image can't be pulled: no such", image=True)),
        (pod(initContainerStatuses=PULLED), stops("the image can't be pulled: Back-off", image=True)),
        (wrong("InvalidImageName"), stops("the image can't be pulled: InvalidImageName", image=True, lasting=True)),
        *((wrong("CreateContainerConfigError", f"{said} (pod: x)"), as_root(said)) for said in (ROOT, USER)),
        # It runs.
        (running(), None),
        # It has ended: a condition says why.
        (BY_PRIORITY, Ended(C.PREEMPTED, 0, "for one of a higher priority")),
        (disrupted("EvictionByEvictionAPI", state=terminated(143)), Ended(C.EVICTED, 143, "x")),
        (disrupted("DeletionByTaintManager"), Ended(C.EVICTED, 0, "x")),
        (disrupted("TerminationByKubelet", LOW, terminated(137), reason="Evicted"), Ended(C.EVICTED, 137, LOW)),
        (stopped("WorkloadEvictedDueToPreempted", "for another"), Ended(C.PREEMPTED, 0, "Kueue: for another")),
        (stopped("WorkloadDeleted", ""), Ended(C.EVICTED, 0, "Kueue: WorkloadDeleted")),
        # Without the condition: the pod's own reason.
        (failed(reason="SysctlForbidden", message="no sysctl"), Ended(C.CRASHED, -9, "no sysctl")),
        (failed(reason="Preempting", message="for a critical pod"), Ended(C.PREEMPTED, -9, "for a critical pod")),
        (failed(reason="SomethingNew", message="who knows"), Ended(C.EVICTED, -9, "who knows")),
        (failed(), Ended(C.CRASHED, 1, "its pod has failed")),
        # Its exit code.
        (failed(terminated(3, message="a\nb\n")), Ended(C.CRASHED, 3, f"exit code 3; {LOG}", "a\nb\n")),
        (failed(terminated(137)), Ended(C.KILLED, 137, "SIGKILL")),
        (failed(OOM), NO_MEMORY),
        (LIMITED, Ended(C.OUT_OF_MEMORY, 137, "it took more memory than its limit of 2Gi")),
        (failed(terminated(128, "StartError", "no python")), Ended(C.CRASHED, 128, "can't start it: no python")),
        # With further containers it is over when the worker is; alone, its node has not finished telling.
        (of({}, {"name": "sidecar"}, phase="Running", state=terminated(0)), Ended(C.CLEAN, 0, "exit code 0")),
        (of({}, phase="Running", state=terminated(0)), stops("it is being started on node n0")),
    ],
)
def test_what_a_pod_says(seen, found):
    assert judge_pod(seen, told=False) == found


@pytest.mark.parametrize(
    ("last", "told", "ended"),
    [
        (disrupted("DeletionByTaintManager", state=RUNNING), False, Ended(C.NODE_LOST, -9, "x")),
        (running(reason="NodeLost", message=SILENT), False, Ended(C.NODE_LOST, -9, SILENT)),
        (running(conditions=[condition("Ready", "False")]), False, Ended(C.NODE_LOST, -9, "node n0 does not answer")),
        (running(conditions=[condition("Ready")]), False, Ended(C.DELETED, -9, DELETED)),
        (pod(phase="Running", state=terminated(137), deleted=True), False, Ended(C.DELETED, 137, DELETED)),
        (pod(phase="Running", state=terminated(0), deleted=True), True, Ended(C.KILLED, 0, "as told")),
        (pod(node=""), True, Ended(C.KILLED, -9, "it had no place yet")),
    ],
)
def test_what_the_last_that_was_seen_of_a_pod_says(last, told, ended):
    assert judge_end(last, told=told, gone=True) == ended


def test_a_workers_pod_belongs_to_the_job_and_no_other():
    """The state is its controller if it goes with the job: else `kubectl drain` refuses the pod."""
    made = PODS.manifest(7, 2)
    assert (number_of(made), index_of(made), PODS.owns(made)) == (7, 2, True)
    for others in (
        {"ownerReferences": [{"uid": "other"}]},
        {"ownerReferences": None},
        {"name": "somebody-elses"},
        {"labels": {"elasticdl.org/worker": "abc"}},
        {"labels": {"elasticdl.org/worker": "7", "elasticdl.org/place": "first"}},
    ):
        assert not PODS.owns({"metadata": {**made["metadata"], **others}}), others
    job = {"metadata": {"name": "digits-master", "uid": "j"}}
    of_state = {"name": "digits-state", "uid": "s"}
    owner, controller = owner_references(job, {"metadata": {**of_state, "ownerReferences": [{"uid": "j"}]}})
    assert controller == {"apiVersion": "v1", "kind": "ConfigMap", **of_state, "controller": True}
    assert owner_references(job, {"metadata": {**of_state, "ownerReferences": [{"uid": "other"}]}}) == [owner]


def workers(template=PODS.template, priority=None, limits=PODS.limits):
    return WorkerPods(PODS.job, PODS.namespace, PODS.owners, template, limits=limits, priority=priority)


@pytest.mark.parametrize(("share", "urgent"), [(1.0, 4), (0.3, 2), (0, 0)])
def test_the_first_places_are_urgent_a_share_of_the_range_which_the_job_has_now(share, urgent):
    limits = WorkerRange(minimum=1, maximum=4)
    pods = workers(priority=Priority("high", share), limits=lambda: limits)
    classes = [pods.manifest(10 + place, place)["spec"].get("priorityClassName") for place in range(5)]
    assert classes == ["high"] * urgent + [None] * (5 - urgent)
    limits = WorkerRange(minimum=1, maximum=40)
    assert pods.urgent == 40 * share


def test_a_worker_may_be_kept_from_nodes_and_the_users_own_affinity_stays():
    often = "preferredDuringSchedulingIgnoredDuringExecution"
    own = {"podAntiAffinity": {"x": 1}, "nodeAffinity": {often: ["first"]}}
    pods = workers({**PODS.template, "spec": {**PODS.template["spec"], "affinity": own}})
    assert pods.manifest(1, 0)["spec"]["affinity"] == own
    made = pods.manifest(1, 0, ("b", "c"))["spec"]["affinity"]
    first, avoiding = made["nodeAffinity"][often]
    assert (made["podAntiAffinity"], first) == ({"x": 1}, "first")
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("b", "c")]
    assert avoiding["preference"]["matchFields"] == fields, "a field may be compared with one value only"
    spec = JobSpec.model_validate({"image": "i", "job_name": "digits", "gang": True, "queue": "kueue=a"})
    alike = workers(worker_template(spec, "lab"))  # as Kueue wants all pods of a gang
    assert "affinity" not in alike.manifest(1, 0, ("b",))["spec"]


# When another master is of no use any more: what earlier ones have left decides.

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LOST = {"metadata": {"name": "lost", "ownerReferences": [{"uid": "job"}]}, "spec": {}, "status": {"phase": "Failed"}}


def master(number, code=1, seconds=3.0, *, job="job", **more):
    """The pod of the master that was started as the so-manieth."""
    state = terminated(code, message="Traceback\nRuntimeError: out of luck", **more)
    started = BEGIN + timedelta(hours=number)
    times = {"startedAt": started, "finishedAt": started + timedelta(seconds=seconds)}
    state["terminated"].update({key: f"{time:%Y-%m-%dT%H:%M:%SZ}" for key, time in times.items()})
    status = {"phase": "Failed", "containerStatuses": [{"name": "elasticdl", "state": state}]}
    about = {"name": f"m-{number}", "namespace": "lab", "ownerReferences": [{"uid": job}]}
    return {"metadata": about, "spec": {"containers": [{"name": "elasticdl"}], "nodeName": "n"}, "status": status}


def masters(count=MOST_CRASHES, **more):
    return [master(number, **more) for number in range(count)]


@pytest.mark.parametrize(
    ("seen", "is_enough"),
    [
        (masters()[::-1], True),
        (masters(reason="OOMKilled", code=137), True),
        ([], False),
        (masters(MOST_CRASHES - 1), False),
        (masters(100, code=137), False),
        (masters(100, seconds=judge.SOON_SECONDS), False),
        (masters(100, job="one of the same name, before"), False),
        ([*masters(MOST_CRASHES - 1), master(50, seconds=86400), *masters(0)], False),
        ([*masters(), master(50, code=143)], False),
        ([LOST] * 100, False),
    ],
    ids=["crashed", "memory", "none", "few", "killed", "late", "another job", "one at work", "one that left", "lost"],
)
def test_masters_that_crash_again_and_again_are_enough_and_anything_else_has_another_one_started(seen, is_enough):
    told = crash_loop(last_crashes(seen, "job"))
    assert told.startswith(f"its master crashed {MOST_CRASHES} times in a row: ") if is_enough else told == ""
