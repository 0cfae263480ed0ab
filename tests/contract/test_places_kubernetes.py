"""The contract of places and what is particular to pods, on a real control plane."""

import asyncio
import contextlib

import pytest
from kubernetes import client
from kubernetes_bench import JOB, api_of, kubernetes_bench, make_places, name, pods_left, threads_left, worker_pods
from places_kit import Bench
from test_places_contract import CHECKS

from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import PlaceState
from tests.stories import on

pytest_plugins = ["tests.cluster.fixtures"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, own_cluster, namespace, tmp_path):
    async def run():
        async with kubernetes_bench(own_cluster, namespace, tmp_path) as bench:
            await check(bench)

    asyncio.run(run())
    assert threads_left() == []


class Scene(Bench):
    """Places on a cluster, and the hands of somebody else in it."""

    def __init__(self, cluster, namespace, work):
        self.api = api_of(cluster)
        self.core = client.CoreV1Api(self.api)
        self.namespace = namespace
        self.pods = worker_pods(cluster, namespace, work)
        super().__init__(self.another)

    def another(self, report=None):
        return make_places(self.api, self.pods, report or self.reports.put_nowait)

    async def loss(self, number):
        await self.until(lambda scene: name(number) in scene.lost)
        return self.lost[name(number)]

    async def ask(self, method, *arguments, **options):
        """Somebody else's request, in this namespace."""
        return await asyncio.to_thread(getattr(self.core, method), *arguments, **options)

    async def pod(self, number):
        return await self.ask("read_namespaced_pod", name(number), self.namespace)


@contextlib.asynccontextmanager
async def on_cluster(own_cluster, namespace, tmp_path):
    """Nothing is left of it."""
    scene = Scene(own_cluster, namespace, tmp_path)
    try:
        assert await scene.places.found() == ()
        yield scene
    finally:
        await scene.places.close()
    assert pods_left(scene.api, namespace) == []
    assert threads_left() == []


@contextlib.contextmanager
def priority_class(api, name, value):
    scheduling = client.SchedulingV1Api(api)
    scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    try:
        yield
    finally:
        scheduling.delete_priority_class(name)


@on(on_cluster)
async def test_a_place_that_is_taken_is_told_from_a_deletion(scene, namespace):
    with priority_class(scene.api, f"urgent-{namespace}", 1000):
        await scene.become_ready(2)
        intruder = scene.pods.manifest(99, 0)
        intruder["metadata"] = {"name": "intruder", "namespace": namespace}
        intruder["spec"]["priorityClassName"] = f"urgent-{namespace}"
        await scene.ask("create_namespaced_pod", namespace, intruder)
        await scene.until(lambda scene: scene.lost)
        (lost,) = scene.lost.values()
        assert (lost.cause, "preempting" in lost.detail) == (ExitCause.PREEMPTED, True)
        await scene.ask("delete_namespaced_pod", "intruder", namespace, grace_period_seconds=0)


@pytest.mark.parametrize("options", [{}, {"grace_period_seconds": 0}], ids=["with grace", "at once"])
@on(on_cluster)
async def test_a_pod_that_somebody_deletes(scene, options):
    await scene.become_ready(1)
    await scene.ask("delete_namespaced_pod", name(0), scene.namespace, **options)
    lost = await scene.loss(0)
    assert (lost.cause, lost.detail) == (ExitCause.DELETED, f"somebody deleted pod {name(0)}")


@on(on_cluster)
async def test_an_api_server_that_is_away_for_a_while_costs_nothing(scene, own_cluster):
    await scene.become_ready(1)
    away = asyncio.create_task(asyncio.to_thread(own_cluster.restart_api_server, 2.0))
    await asyncio.sleep(0)
    scene.places.give_back(name(0), at_once=False)
    scene.places.want(1, frozenset())
    await away
    await scene.until(lambda scene: name(0) in scene.lost and scene.ready() == [name(1)])


@on(on_cluster)
async def test_another_master_takes_over_what_it_finds(scene):
    await scene.become_ready(2)
    await scene.places.close(keep=True)
    scene.places = scene.another()
    found = await scene.places.found()
    assert {place.id for place in found} == {name(0), name(1)}
    assert all(place.node and place.state is PlaceState.READY for place in found)
    await scene.ask("delete_namespaced_pod", name(0), scene.namespace)
    await scene.loss(0)
    scene.places.give_back(name(1), at_once=True)
    assert (await scene.loss(1)).cause is ExitCause.KILLED


@on(on_cluster)
async def test_a_lost_node_is_told_from_a_deletion(scene, own_cluster):
    await scene.become_ready(1)
    node = (await scene.pod(0)).spec.node_name
    await asyncio.to_thread(own_cluster.lose_node, node)
    try:
        await scene.until(lambda scene: scene.now[name(0)].state is PlaceState.ENDING)
        scene.places.give_back(name(0), at_once=True)
        assert (await scene.loss(0)).cause is ExitCause.NODE_LOST
    finally:
        await asyncio.to_thread(own_cluster.add_node, node, 3)


@on(on_cluster)
async def test_a_pod_is_controlled_so_that_its_node_can_be_drained_and_goes_with_the_job(scene, namespace):
    """The Job itself would disown a pod that it controls and has not started."""
    await scene.become_ready(1)
    owners = [(each.kind, each.controller) for each in (await scene.pod(0)).metadata.owner_references]
    assert owners == [("Job", None), ("ConfigMap", True)]
    jobs, options = client.BatchV1Api(scene.api), {"propagation_policy": "Background"}
    await asyncio.to_thread(jobs.delete_namespaced_job, f"{JOB}-master", namespace, **options)
    assert (await scene.loss(0)).cause is ExitCause.DELETED
