"""The GPUs of a cluster's nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kubernetes import client

from elasticdl.job.quantities import GPU
from elasticdl.kube.client import ANSWER_SECONDS


def gpu_capacity(core: client.CoreV1Api) -> dict[str, int]:
    """By node, of those that take pods: not of one that is lost, or kept free."""
    answer: Any = core.list_node(_preload_content=False, _request_timeout=ANSWER_SECONDS)
    nodes = (node for node in json.loads(answer.data)["items"] if _takes_pods(node))
    return {node["metadata"]["name"]: int(node["status"]["allocatable"].get(GPU, 0)) for node in nodes}


def _takes_pods(node: Mapping[str, Any]) -> bool:
    spec = node["spec"]
    return not spec.get("unschedulable") and not any(
        taint["effect"] != "PreferNoSchedule" for taint in spec.get("taints", [])
    )
