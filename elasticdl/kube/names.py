"""What the objects of a job are called, and the labels by which they are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl.common.credentials import Role

APPLICATION_LABEL = "app.kubernetes.io/name"
APPLICATION = "elasticdl"
JOB_LABEL = "elasticdl.org/job"
ROLE_LABEL = "elasticdl.org/role"
# The number of a pod for workers; its first worker mostly has the same, those that follow there have others.
WORKER_LABEL = "elasticdl.org/worker"
# How early a pod is filled: 0 is the first, and the last to be given up.
PLACE_LABEL = "elasticdl.org/place"
ELASTIC_LABEL = "elastic"
# By these a gang's pods name their group.
KUEUE_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
CONTAINER = "elasticdl"  # in every pod of a job, so that one template fits all
MASTER_PORT = 50001
METRICS_PORT = 50002


def labels(job: str, role: Role) -> dict[str, str]:
    return {APPLICATION_LABEL: APPLICATION, JOB_LABEL: job, ROLE_LABEL: str(role)}


def selector(job: str, role: Role) -> str:
    return f"{JOB_LABEL}={job},{ROLE_LABEL}={role}"


def master_name(job: str) -> str:
    """Of the Job, its Service, and what the master may do."""
    return f"{job}-master"


def worker_name(job: str, number: int) -> str:
    """Of a pod for workers."""
    return f"{job}-worker-{number}"


def tls_name(job: str, role: Role) -> str:
    return f"{job}-{role}-tls"


def spec_name(job: str) -> str:
    return f"{job}-spec"


def environment_name(job: str) -> str:
    """Of the Secret with the variables of ``--envs``."""
    return f"{job}-envs"


def state_name(job: str) -> str:
    """Of the ConfigMap that the master writes."""
    return f"{job}-state"


def group_name(job: str) -> str:
    """By which a queueing scheduler knows the workers of a gang."""
    return f"{job}-workers"


def master_address(job: str, namespace: str) -> str:
    """By which the job's own pods find the master, whatever pod it is in at the moment."""
    return f"{master_name(job)}.{namespace}.svc:{MASTER_PORT}"


def without_name(refusal: str) -> str:
    """Why an object is forbidden, without the object's name, which the user does not know."""
    _, forbidden, reason = refusal.partition(" is forbidden: ")
    return reason if forbidden else refusal


def job_reference(job: Mapping[str, Any]) -> dict[str, Any]:
    """What goes with this Job has it among its owners."""
    metadata = job["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}


def owner_uids(made: Mapping[str, Any]) -> set[str]:
    """Of the objects with which this one goes."""
    return {str(each["uid"]) for each in made["metadata"].get("ownerReferences") or ()}
