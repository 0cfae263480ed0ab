"""Removing a job from a cluster, with everything that belongs to it."""

from __future__ import annotations

import time

from elasticdl.cli.cluster.namespace_home import ANY_JOB
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.kube.api_error import ABSENT, NotDoneError
from elasticdl.kube.client import Client, connect
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.kueue import end_group

POLL = 0.5
DELETION_TIMEOUT = 120.0  # beyond the longest grace period of a pod that is likely
# What the master works with goes after it; until then it may still leave in good order.
_KINDS = (
    "Job",
    "Pod",
    "Service",
    "NetworkPolicy",
    "RoleBinding",
    "Role",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "Lease",
    "PodGroup",
)
# Users who may not list these can't have made them: the job's master has an account that was there, and shares no queue.
_WITH_MORE_RIGHTS = ("RoleBinding", "Role", "ServiceAccount", "Lease", "PodGroup")
_NOT_EVERYWHERE = ("PodGroup",)  # a cluster without Volcano knows no such objects


def delete(name: str, namespace: str, context: str) -> str:
    """Returns when all is gone.

    Raises:
        UserError: there is no such job, or the cluster does not let it be deleted.
        UnreachableError: pods are still there after a long time.
    """
    client = connect(ClusterTarget(namespace, context))
    if not _delete_once(client, name):
        client.require_namespace()
        raise UserError(f"there is nothing of a job {name} in namespace {client.namespace}")
    wait_until_gone(client, name)
    return f"job {name} deleted"


def wait_until_gone(client: Client, name: str) -> None:
    """What comes into being meanwhile is deleted as well."""
    deadline = time.monotonic() + DELETION_TIMEOUT
    while left := _delete_once(client, name):
        if time.monotonic() > deadline:
            names = ", ".join(left)
            raise UnreachableError(
                f"{names} of job {name} are still there {DELETION_TIMEOUT:.0f} s after they were deleted"
            )
        time.sleep(POLL)


def _delete_once(client: Client, name: str) -> list[str]:
    """What there was."""
    found = []
    for kind in _KINDS:
        try:
            listed = client.list(kind, label_selector=f"{ANY_JOB}={name}")
        except NotDoneError as error:
            if (error.by_rights and kind in _WITH_MORE_RIGHTS) or (error.status == ABSENT and kind in _NOT_EVERYWHERE):
                continue
            raise
        if kind == "Pod":
            end_group(client, listed)
        for metadata in (each["metadata"] for each in listed):
            found.append(f"{kind} {metadata['name']}")
            if not metadata.get("deletionTimestamp"):
                client.delete(kind, metadata["name"])
    return found
