"""Removing a job: its Job, and all that has its label, so that also what has no owner goes."""

from __future__ import annotations

import time

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.kubernetes.api_error import NotDoneError
from elasticdl.kubernetes.client import Client, Object, connect
from elasticdl.kubernetes.kubeconfig import Place
from elasticdl.kubernetes.manifests.names import APPLICATION, APPLICATION_LABEL, JOB_LABEL

# What the master works with goes after it; until then it may still leave in good order.
KINDS = ("Job", "Pod", "Service", "NetworkPolicy", "RoleBinding", "Role", "ServiceAccount", "Secret", "ConfigMap")
# Users who may not list these can't have made them: the job's master has an account that was there.
_OF_ADMINISTRATORS = ("RoleBinding", "Role", "ServiceAccount")
TIMEOUT = 120.0  # beyond the longest grace period of a pod that is likely
POLL = 0.5


def delete(name: str, namespace: str, context: str) -> str:
    """Returns when all is gone.

    Raises:
        UserError: there is no such job, or the cluster does not let it be deleted.
        UnreachableError: pods are still there after a long time.
    """
    client = connect(Place(namespace, context))
    if not _delete_once(client, name):
        client.require_namespace()
        raise UserError(f"there is nothing of a job {name} in namespace {client.namespace}")
    wait_until_gone(client, name)
    return f"job {name} deleted"


def wait_until_gone(client: Client, name: str) -> None:
    """What comes into being meanwhile is deleted as well."""
    deadline = time.monotonic() + TIMEOUT
    while left := _delete_once(client, name):
        if time.monotonic() > deadline:
            names = ", ".join(left)
            raise UnreachableError(f"{names} of job {name} are still there {TIMEOUT:.0f} s after they were deleted")
        time.sleep(POLL)


def _delete_once(client: Client, name: str) -> list[str]:
    """What there was."""
    found = []
    for kind in KINDS:
        for each in _listed(client, kind, name):
            metadata = each["metadata"]
            found.append(f"{kind} {metadata['name']}")
            if not metadata.get("deletionTimestamp"):
                client.delete(kind, metadata["name"])
    return found


def _listed(client: Client, kind: str, name: str) -> list[Object]:
    try:
        return client.list(kind, label_selector=f"{APPLICATION_LABEL}={APPLICATION},{JOB_LABEL}={name}")
    except NotDoneError as error:
        if error.by_rights and kind in _OF_ADMINISTRATORS:
            return []
        raise
