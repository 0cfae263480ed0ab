"""A small gang scheduler: all pods of a group get their nodes at once, or none does.

Kubernetes' own scheduler places pods one by one, so that a group which does not fit would hold the GPUs that it did get.
This one takes the pods that ask for Volcano, as `elasticdl train --gang --queue volcano=NAME` makes them, in a cluster that
has no Volcano. It looks at GPUs only, and serves the groups in the order in which they came.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kubernetes import client
from urllib3.exceptions import HTTPError

from benchmarks.experiments.pods import Pod, Pods, PodWatch, gpu_capacity, held_gpus, is_over, owner_of, wanted_gpus
from elasticdl.kube.client import ANSWER_SECONDS

SCHEDULER = "volcano"
QUEUE = f"{SCHEDULER}=default"
SIZE = "scheduling.volcano.sh/group-min-member"
_GONE_OR_BOUND = (404, 409)


def place(pods: Iterable[Pod], capacity: Mapping[str, int]) -> dict[str, str]:
    """The node of each pod that is to be bound now, given all pods in the order of their coming and each node's GPUs."""
    free, placed = Counter(capacity), Counter[str]()
    waiting: dict[str, list[Pod]] = defaultdict(list)
    for pod in pods:
        if node := pod["spec"].get("nodeName"):
            free[node] -= held_gpus(pod)
            placed[owner_of(pod)] += _is_of_a_group(pod) and not is_over(pod)
        elif _is_of_a_group(pod) and "deletionTimestamp" not in pod["metadata"]:
            waiting[owner_of(pod)].append(pod)
    bound: dict[str, str] = {}
    for owner, group in waiting.items():
        complete = placed[owner] + len(group) >= int(group[0]["metadata"]["annotations"][SIZE])
        if complete and (nodes := _fit(group, free)):
            bound |= nodes
    return bound


def _is_of_a_group(pod: Pod) -> bool:
    return pod["spec"].get("schedulerName") == SCHEDULER and SIZE in (pod["metadata"].get("annotations") or {})


def _fit(group: Sequence[Pod], free: Counter[str]) -> dict[str, str]:
    """A node for each, taken off what is free; or nothing."""
    left, nodes = Counter(free), dict[str, str]()
    for pod in sorted(group, key=wanted_gpus, reverse=True):
        node = next((name for name in sorted(left) if left[name] >= wanted_gpus(pod)), None)
        if node is None:
            return {}
        left[node] -= wanted_gpus(pod)
        nodes[pod["metadata"]["name"]] = node
    free.clear()
    free.update(left)
    return nodes


class GangScheduler(PodWatch):
    """Serves one namespace while its context lasts. Only pods of this namespace may hold GPUs."""

    def __init__(self, core: client.CoreV1Api, namespace: str) -> None:
        super().__init__(core, namespace)
        self._core = core
        self._namespace = namespace
        self._bound: dict[str, str] = {}  # by uid: the watch tells it a moment later

    def see(self, pods: Pods) -> None:
        """Bind what can be bound; what can't is tried again with the next change of any pod."""
        by_age = sorted(pods.values(), key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))
        known = [self._as_bound(pod) for pod in by_age]
        if not any(_is_of_a_group(pod) and not pod["spec"].get("nodeName") for pod in known):
            return
        try:
            capacity = gpu_capacity(self._core)  # anew: nodes get lost
        except (client.ApiException, HTTPError) as error:
            print(f"gang scheduler: the nodes can't be seen: {error}", file=sys.stderr)
            return
        for name, node in place(known, capacity).items():
            target = client.V1ObjectReference(kind="Node", name=node)
            binding = client.V1Binding(metadata=client.V1ObjectMeta(name=name), target=target)
            try:
                self._core.create_namespaced_binding(
                    self._namespace, binding, _preload_content=False, _request_timeout=ANSWER_SECONDS
                )
            except (client.ApiException, HTTPError) as error:
                if getattr(error, "status", None) not in _GONE_OR_BOUND:
                    print(f"gang scheduler: {name}: {error}", file=sys.stderr)
            else:
                self._bound[pods[name]["metadata"]["uid"]] = node

    def _as_bound(self, pod: Pod) -> Pod:
        node = self._bound.get(pod["metadata"]["uid"])
        return {**pod, "spec": {**pod["spec"], "nodeName": node}} if node else pod
