"""The contract of places and what is particular to pods, on a real control plane."""

import asyncio
import contextlib
import random
import threading

import pytest
from kubernetes import client
from places_kit import PlacesBench, opened
from test_places_contract import CHECKS

from elasticdl.common.credentials import Role
from elasticdl.job.spec import WorkerRange
from elasticdl.kube.client import connect
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.names import labels, selector, state_name
from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import PlaceState
from elasticdl.places.pod_places import PodPlaces, PodTimeouts
from elasticdl.places.worker_pods import WorkerPodApi, WorkerPods
from tests.stories import on

pytest_plugins = ["tests.cluster.fixtures"]

JOB = "bench"


def template(image):
    """All of a node; told to leave, it takes a moment and ends with 0."""
    command = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done"]
    limits = {"limits": {"nvidia.com/gpu": "3"}}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "automountServiceAccountToken": False}
    container = {"name": "elasticdl", "image": image, "command": command, "resources": limits}
    metadata = {"labels": labels(JOB, Role.WORKER), "annotations": {}}
    return {"metadata": metadata, "spec": {**spec, "containers": [container]}}


def name(number):
    return f"{JOB}-worker-{number}"


@contextlib.asynccontextmanager
async def on_cluster(own_cluster, namespace):
    """Places with room for two, of which nothing is left, and the hands of somebody else in the cluster."""
    here = connect(ClusterTarget(namespace, file=str(own_cluster.kubeconfig)))
    core, mine = client.CoreV1Api(here.api), selector(JOB, Role.WORKER)
    state = core.create_namespaced_config_map(namespace, {"metadata": {"name": state_name(JOB)}}).metadata
    owners = [{"apiVersion": "v1", "kind": "ConfigMap", "name": state.name, "uid": state.uid}]
    limits = WorkerRange(minimum=1, maximum=4)
    pods = WorkerPods(JOB, namespace, owners, template(own_cluster.image), limits=lambda: limits)

    def make(report):
        """Nobody tells what runs in the pods to leave."""
        return PodPlaces(WorkerPodApi(here, JOB), pods, report, PodTimeouts(leave=0.0), random.Random(7))

    bench = PlacesBench(make, lambda _, place_id: core.delete_namespaced_pod(place_id, namespace))
    bench.another = lambda: make(bench.reports.put_nowait)
    async with opened(bench):
        yield bench
    left = core.list_namespaced_pod(namespace, label_selector=mine).items
    assert [pod.metadata.name for pod in left if pod.status.phase in ("Pending", "Running")] == []
    assert not [each.name for each in threading.enumerate() if each.name.startswith("kubernetes")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@on(on_cluster)
async def test_contract(bench, check):
    await check(bench)


@on(on_cluster)
async def test_another_master_takes_over_what_it_finds_and_hears_what_somebody_deletes(bench):
    await bench.become_ready(2)
    await bench.places.close(keep=True)
    bench.places = bench.another()
    found = await bench.places.found()
    assert {place.id for place in found} == {name(0), name(1)}
    assert all(place.node and place.state is PlaceState.READY for place in found)
    await asyncio.to_thread(bench.lose, bench, name(0))
    bench.places.give_back(name(1), at_once=True)
    await bench.until(lambda bench: len(bench.lost) == 2)
    lost = bench.lost[name(0)]
    assert (lost.cause, lost.detail) == (ExitCause.DELETED, f"somebody deleted pod {name(0)}")
    assert bench.lost[name(1)].cause is ExitCause.KILLED
