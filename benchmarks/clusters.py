"""The cluster that a benchmark runs on: one made for it (tier 1 of the tests), or whichever a kubeconfig names."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config

from tests.cluster.cluster import Cluster
from tests.cluster.kit import new_namespace
from tests.cluster.programs import find_programs

TIER1, KUBECONFIG = "tier1", "kubeconfig"
GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace of the benchmark's own, and by what it is reached."""

    kubeconfig: Path
    namespace: str
    image: str
    api: client.ApiClient

    @property
    def core(self) -> Any:
        """A `CoreV1Api`: to the type checker it takes no dictionary, and every field of what it gives may be missing."""
        return client.CoreV1Api(self.api)

    def environment(self, home: Path) -> dict[str, str]:
        """For the command line, whose own files go to ``home``."""
        return {"KUBECONFIG": str(self.kubeconfig), "ELASTICDL_HOME": str(home)}


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", choices=(TIER1, KUBECONFIG), default=TIER1, help="default: one made for it")
    default = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    parser.add_argument("--kubeconfig", type=Path, default=default, help="its current context is used")
    parser.add_argument("--image", default=Cluster.image, help="with this repository in it, for --cluster kubeconfig")


def end_cleanly() -> None:
    """SIGTERM and SIGINT, which a shell has its background jobs ignore, end this process through its contexts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))


@contextmanager
def opened(args: argparse.Namespace, nodes: Mapping[str, int]) -> Iterator[Place]:
    """A cluster with these nodes and their GPUs if it is made here; everything that was made goes at the end.

    Raises:
        Unavailable, BuildError, ControlPlaneError: it can't be made here.
        OSError, config.ConfigException, client.ApiException: the given one can't be used.
    """
    with ExitStack() as stack:
        kubeconfig: Path = args.kubeconfig
        if args.cluster == TIER1:
            programs = find_programs(lambda line: print(line, file=sys.stderr, flush=True))
            kubeconfig = stack.enter_context(Cluster(programs, nodes)).kubeconfig
        api = config.new_client_from_config(str(kubeconfig))
        namespace = stack.enter_context(new_namespace(api))
        yield Place(kubeconfig, namespace, args.image, api)


@contextmanager
def priority_class(place: Place, value: int) -> Iterator[str]:
    """A PriorityClass for as long as it is needed; no namespace holds these."""
    scheduling: Any = client.SchedulingV1Api(place.api)
    name = f"{place.namespace}-{value}"
    scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    try:
        yield name
    finally:
        scheduling.delete_priority_class(name)


def free_gpus(core: Any, node: str) -> int:
    """Of a node, those that no pod has.

    Raises:
        client.ApiException: there is no such node.
    """
    there = int((core.read_node(node).status.allocatable or {}).get(GPU, 0))
    pods = core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={node}").items
    live = [pod for pod in pods if pod.status.phase not in ("Succeeded", "Failed")]
    limits = [(each.resources and each.resources.limits) or {} for pod in live for each in pod.spec.containers]
    return there - sum(int(each.get(GPU, 0)) for each in limits)
