"""The contract of places and what is particular to pods, on a real control plane."""

import asyncio
import contextlib
import random
import threading

import pytest
from cluster_users import make_owners
from kubernetes import client
from places_kit import Bench, opened
from test_places_contract import CHECKS

from elasticdl.common.credentials import Role
from elasticdl.job.spec import WorkerRange
from elasticdl.kube.client import Client, connect
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.names import labels, selector
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


class Scene(Bench):
    """Places on a cluster with room for two; and the hands of somebody else in it."""

    def __init__(self, cluster, namespace):
        self.api = connect(ClusterTarget(file=str(cluster.kubeconfig))).api
        self.core, self.namespace = client.CoreV1Api(self.api), namespace
        owners, limits = make_owners(self.api, namespace, JOB), WorkerRange(minimum=1, maximum=4)
        self.pods = WorkerPods(JOB, namespace, owners, template(cluster.image), limits=lambda: limits)
        super().__init__(self.another, lambda _, place_id: self.core.delete_namespaced_pod(place_id, namespace))

    def another(self, report=None):
        """Nobody tells what runs in the pods to leave."""
        api, report = WorkerPodApi(Client(self.api, self.namespace), JOB), report or self.reports.put_nowait
        return PodPlaces(api, self.pods, report, PodTimeouts(leave=0.0), random.Random(7))

    def left(self):
        """Pods that are not over, and threads."""
        mine = selector(JOB, Role.WORKER)
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=mine).items
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]
        return [pod.metadata.name for pod in pods if pod.status.phase in ("Pending", "Running")] + threads


@contextlib.asynccontextmanager
async def on_cluster(own_cluster, namespace):
    """Nothing is left of it."""
    async with opened(Scene(own_cluster, namespace)) as scene:
        yield scene
    assert scene.left() == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@on(on_cluster)
async def test_contract(scene, check):
    await check(scene)


@on(on_cluster)
async def test_another_master_takes_over_what_it_finds_and_hears_what_somebody_deletes(scene):
    await scene.become_ready(2)
    await scene.places.close(keep=True)
    scene.places = scene.another()
    found = await scene.places.found()
    assert {place.id for place in found} == {name(0), name(1)}
    assert all(place.node and place.state is PlaceState.READY for place in found)
    await asyncio.to_thread(scene.lose, scene, name(0))
    scene.places.give_back(name(1), at_once=True)
    await scene.until(lambda scene: len(scene.lost) == 2)
    lost = scene.lost[name(0)]
    assert (lost.cause, lost.detail) == (ExitCause.DELETED, f"somebody deleted pod {name(0)}")
    assert scene.lost[name(1)].cause is ExitCause.KILLED
