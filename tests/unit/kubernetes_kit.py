"""Pods as clusters show them, cut down to what is looked at."""

import copy

from elasticdl.job.spec import WorkerRange
from elasticdl.kube.names import job_reference
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


def terminated(code, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


def condition(kind, status="True", reason="", message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(worker_id=0, phase="Pending", state=None, *, node="n0", conditions=(), deleted=False, manifest=None, **status):
    """A pod of the job; ``state`` is that of its container."""
    made = copy.deepcopy(manifest or PODS.manifest(worker_id, worker_id))
    extra = {"deletionTimestamp": "2024-01-01T00:00:30Z"} if deleted else {}
    given = {"uid": f"uid-{worker_id}", "creationTimestamp": "1"}
    metadata = {**given, **made["metadata"], "resourceVersion": "1", **extra}
    spec = {**made["spec"], **({"nodeName": node} if node else {})}
    known = {"podIP": "10.0.0.7", "containerStatuses": [{"name": "elasticdl", "state": state}]} if state else {}
    status = {"phase": phase, "conditions": list(conditions), **known, **status}
    return {**made, "metadata": metadata, "spec": spec, "status": status}
