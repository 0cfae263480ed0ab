"""The contract of places and what is particular to pods, on a real control plane."""

import asyncio
import contextlib

import pytest
from kubernetes import client
from kubernetes_bench import JOB, api_of, end, kubernetes_bench, make_places, name, pods_left, threads_left, worker_pods
from test_places_contract import CHECKS, DEADLINE, Bench

from elasticdl.master.state.events import ExitCause
from elasticdl.places.base import PlaceLost, PlaceState
from elasticdl.places.pods.leftovers import KEPT
from elasticdl.places.pods.pod_places import PodTimeouts

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

    def __init__(self, cluster, namespace, work, **options):
        self.api = api_of(cluster)
        self.core = client.CoreV1Api(self.api)
        self.namespace = namespace
        self.pods = worker_pods(cluster, namespace, work, **options)
        self.losses = {}
        super().__init__(self.another)

    def another(self, report=None):
        return make_places(self.api, self.pods, report or self.reports.put_nowait)

    def take(self, report):
        super().take(report)
        if isinstance(report, PlaceLost):
            self.losses[report.place_id] = report

    async def become_ready(self, count):
        self.places.want(count, frozenset())
        await self.has(ready=count)

    async def loss(self, number):
        await self.until(lambda scene: name(number) in scene.losses)
        return self.losses[name(number)]

    async def delete(self, number, grace=None):
        options = {} if grace is None else {"grace_period_seconds": grace}
        await asyncio.to_thread(self.core.delete_namespaced_pod, name(number), self.namespace, **options)


@pytest.fixture
def play(own_cluster, namespace, tmp_path):
    """Runs a coroutine function on a scene, and sees that nothing is left of it."""

    def run(story, *, found=False, **options):
        async def whole():
            scene = Scene(own_cluster, namespace, tmp_path, **options)
            try:
                if not found:
                    await scene.places.found()
                await story(scene)
            finally:
                await scene.places.close()
            assert pods_left(scene.api, namespace) == []

        asyncio.run(whole())
        assert threads_left() == []

    return run


@contextlib.contextmanager
def priority_class(api, name, value):
    scheduling = client.SchedulingV1Api(api)
    scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    try:
        yield
    finally:
        scheduling.delete_priority_class(name)


def test_who_takes_a_place_is_known(play, namespace):
    async def story(scene):
        with priority_class(scene.api, f"urgent-{namespace}", 1000):
            await scene.become_ready(2)
            intruder = scene.pods.manifest(99, 0)
            intruder["metadata"] = {"name": "intruder", "namespace": namespace}
            intruder["spec"]["priorityClassName"] = f"urgent-{namespace}"
            await asyncio.to_thread(scene.core.create_namespaced_pod, namespace, intruder)
            await scene.until(lambda scene: scene.losses)
            (lost,) = scene.losses.values()
            assert lost.cause is ExitCause.PREEMPTED
            assert "intruder" in lost.detail
            await asyncio.to_thread(scene.core.delete_namespaced_pod, "intruder", namespace, grace_period_seconds=0)

    play(story)


@pytest.mark.parametrize("grace", [None, 0])
def test_a_pod_that_somebody_deletes(play, grace):
    async def story(scene):
        await scene.become_ready(1)
        await scene.delete(0, grace)
        lost = await scene.loss(0)
        assert (lost.cause, lost.detail) == (ExitCause.DELETED, f"somebody deleted pod {name(0)}")

    play(story)


def test_the_reason_to_wait_is_the_schedulers(play):
    async def story(scene):
        scene.places.want(1, frozenset())
        await scene.until(
            lambda scene: any("Insufficient nvidia.com/gpu" in each.reason for each in scene.now.values())
        )

    play(story, gpus=50)


def test_an_api_server_that_is_away_for_a_while_costs_nothing(play, own_cluster):
    async def story(scene):
        await scene.become_ready(1)
        away = asyncio.create_task(asyncio.to_thread(own_cluster.restart_api_server, 2.0))
        await asyncio.sleep(0)
        scene.places.give_back(name(0), at_once=False)
        scene.places.want(1, frozenset())
        await away
        await scene.until(lambda scene: name(0) in scene.losses and scene.ready() == [name(1)])

    play(story)


def test_another_master_takes_over_what_it_finds(play):
    async def story(scene):
        await scene.become_ready(2)
        await scene.places.detach()
        scene.places = scene.another()
        found = await scene.places.found()
        assert {place.id for place in found} == {name(0), name(1)}
        assert all(place.node and place.state is PlaceState.READY for place in found)
        await scene.delete(0)
        await scene.loss(0)
        scene.places.give_back(name(1), at_once=True)
        assert (await scene.loss(1)).cause is ExitCause.KILLED

    play(story)


def test_a_pod_whose_master_died_before_it_heard_of_it_is_taken_over(play):
    async def story(scene):
        await scene.become_ready(1)
        await asyncio.to_thread(scene.core.create_namespaced_pod, scene.namespace, scene.pods.manifest(1, 1))
        scene.places.want(2, frozenset())  # its name is taken, by itself
        await scene.has(ready=2)
        assert sorted(scene.ready()) == [name(0), name(1)]

    play(story)


def test_a_lost_node_is_told_from_a_deletion(play, own_cluster):
    async def story(scene):
        await scene.become_ready(1)
        pod = await asyncio.to_thread(scene.core.read_namespaced_pod, name(0), scene.namespace)
        node = pod.spec.node_name
        await asyncio.to_thread(own_cluster.lose_node, node)
        try:
            while True:  # until the control plane has noticed
                pod = await asyncio.to_thread(scene.core.read_namespaced_pod, name(0), scene.namespace)
                if any(each.type == "Ready" and each.status == "False" for each in pod.status.conditions):
                    break
                await asyncio.sleep(0.5)
            await scene.until(lambda scene: scene.now[name(0)].state is PlaceState.ENDING)
            scene.places.give_back(name(0), at_once=True)
            assert (await scene.loss(0)).cause is ExitCause.NODE_LOST
        finally:
            await asyncio.to_thread(own_cluster.add_node, node, 3)

    play(story)


def test_a_pod_is_controlled_so_that_its_node_can_be_drained_and_goes_with_the_job(play, namespace):
    """The Job itself would disown a pod that it controls and has not started."""

    async def story(scene):
        await scene.become_ready(1)
        pod = await asyncio.to_thread(scene.core.read_namespaced_pod, name(0), namespace)
        assert [(each.kind, each.controller) for each in pod.metadata.owner_references] == [
            ("Job", None),
            ("ConfigMap", True),
        ]
        jobs = client.BatchV1Api(scene.api)
        options = {"propagation_policy": "Background"}
        await asyncio.to_thread(jobs.delete_namespaced_job, f"{JOB}-master", namespace, **options)
        assert (await scene.loss(0)).cause is ExitCause.DELETED

    play(story)


def test_nobody_is_found_at_first(play):
    async def story(scene):
        assert await scene.places.found() == ()

    play(story, found=True)


def test_of_pods_that_are_over_the_newest_are_left(own_cluster, namespace, tmp_path):
    """Failed and completed, and none that runs."""

    async def run():
        pods, api = worker_pods(own_cluster, namespace, tmp_path), api_of(own_cluster)
        bench = Bench(lambda report: make_places(api, pods, report, PodTimeouts(leave=0.0, over=0.0)))

        async def there():
            found = await asyncio.to_thread(client.CoreV1Api(api).list_namespaced_pod, namespace)
            return sorted(each.metadata.name for each in found.items)

        try:
            await bench.places.found()
            bench.places.want(2, frozenset())
            await bench.has(ready=2)
            for number in range(1, KEPT + 3):
                end(tmp_path, number, number % 2)
                await bench.until(lambda bench: len(bench.lost) == number)  # noqa: B023
                bench.places.want(2, frozenset())
                await bench.has(ready=2)
            async with asyncio.timeout(DEADLINE):
                while len(left := await there()) > 2 + KEPT:
                    await asyncio.sleep(0.1)
            assert left == [name(number) for number in (0, *range(3, KEPT + 4))]
        finally:
            await bench.places.close()

    asyncio.run(run())
