"""The group in which Kueue admits the workers of a gang together: its size, and its end.

Kueue deletes a pod beyond the size, and counts one that leaves until it is over. A pod that has failed is kept, and so is the quota of
the whole group, until another takes its place, or the group is said to be over: a pod of it says that it is not to be tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl.kube.manifests.names import KUEUE_GROUP_LABEL

SIZE = "kueue.x-k8s.io/pod-group-total-count"
# Kueue may take a pod off the books whose node is lost: what runs on there is no member of any later world.
ANNOTATIONS: Mapping[str, str] = {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}
_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
_FINALIZER = "kueue.x-k8s.io/managed"
# A change of a pod, by which its group is over when none of its pods runs any more.
OVER: Mapping[str, Any] = {"metadata": {"annotations": {_RETRIABLE: "false"}}}


def size_of(pod: Mapping[str, Any]) -> int | None:
    """Of the pod's group; None if it is in none."""
    metadata = pod["metadata"]
    size = (metadata.get("annotations") or {}).get(SIZE)
    return int(size) if size and KUEUE_GROUP_LABEL in metadata["labels"] else None


def is_kept(pod: Mapping[str, Any]) -> bool:
    """Whether Kueue would keep a pod of a group, were it to fail."""
    metadata = pod["metadata"]
    said = (metadata.get("annotations") or {}).get(_RETRIABLE)
    grouped = KUEUE_GROUP_LABEL in (metadata.get("labels") or {})
    return grouped and said != "false" and _FINALIZER in (metadata.get("finalizers") or ())
