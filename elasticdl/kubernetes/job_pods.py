"""Which pods are a job's: those with its labels that its master's Job owns, as labels can be on anybody's pod."""

from __future__ import annotations

from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.manifests.names import JOB_LABEL, ROLE_LABEL, WORKER_LABEL, Role, master_name, selector


def find_master(client: Client, job: str) -> Object | None:
    """The newest pod of the job's master, whatever its state; None if there is none (any more, or yet)."""
    pods = _owned(client, job, selector(job, Role.MASTER))
    return max(pods, key=_age, default=None)


def is_running(pod: Object | None) -> bool:
    return bool(
        pod and pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
    )


def find_pods(client: Client, job: str, worker: int | None) -> list[Object]:
    """The oldest first."""
    only = f",{WORKER_LABEL}={worker}" if worker is not None else ""
    pods = _owned(client, job, f"{JOB_LABEL}={job}{only}")
    return sorted((pod for pod in pods if ROLE_LABEL in pod["metadata"]["labels"]), key=_age)


def _owned(client: Client, job: str, labels: str) -> list[Object]:
    return [pod for pod in client.list("Pod", label_selector=labels) if _is_owned(pod, job)]


def _is_owned(pod: Object, job: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any((owner["kind"], owner["name"]) == ("Job", master_name(job)) for owner in owners)


def _age(pod: Object) -> str:
    return str(pod["metadata"]["creationTimestamp"])
