"""The contract of launchers and what is particular to pods, on a real control plane."""

import asyncio
import contextlib

import pytest
from elasticdl.places.pods.launcher import Patience
from kubernetes import client
from kubernetes_bench import JOB, api_of, kubernetes_bench, make_launcher, pods_left, threads_left, worker_pods
from test_launcher_contract import CHECKS, DEADLINE

from elasticdl.master.state.events import ExitCause, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.pods.leftovers import KEPT

pytest_plugins = ["tests.cluster.fixtures"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, own_cluster, namespace, tmp_path):
    async def run():
        async with kubernetes_bench(own_cluster, namespace, tmp_path) as bench:
            await check(bench)

    asyncio.run(run())
    assert threads_left() == []


class Scene:
    """A launcher on a cluster, and the hands of somebody else in it."""

    def __init__(self, cluster, namespace, work, **options):
        self.api = api_of(cluster)
        self.core = client.CoreV1Api(self.api)
        self.namespace = namespace
        self.pods = worker_pods(cluster, namespace, work, **options)
        self.reports = asyncio.Queue()
        self.launcher = self.another()

    def another(self):
        return make_launcher(self.api, self.pods, self.reports.put_nowait)

    async def next(self, kind):
        """The next report of this kind; others, but ends, are passed over."""
        while True:
            report = await asyncio.wait_for(self.reports.get(), DEADLINE)
            if isinstance(report, kind):
                return report
            assert not isinstance(report, WorkerExited), report

    async def placed(self, *ids):
        for worker_id in ids:
            await self.launcher.launch(worker_id)
            await self.next(WorkerPlaced)

    async def delete(self, worker_id, grace=None):
        options = {} if grace is None else {"grace_period_seconds": grace}
        name = f"{JOB}-worker-{worker_id}"
        await asyncio.to_thread(self.core.delete_namespaced_pod, name, self.namespace, **options)


@pytest.fixture
def play(own_cluster, namespace, tmp_path):
    """Runs a coroutine function on a scene, and sees that nothing is left of it."""

    def run(story, *, found=False, **options):
        async def whole():
            scene = Scene(own_cluster, namespace, tmp_path, **options)
            try:
                if not found:
                    await scene.launcher.find()
                await story(scene)
            finally:
                await scene.launcher.close()
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


def test_who_takes_a_workers_place_is_known(play, namespace):
    async def story(scene):
        with priority_class(scene.api, f"urgent-{namespace}", 1000):
            await scene.placed(0, 1)
            intruder = scene.pods.manifest(99, 0)
            intruder["metadata"] = {"name": "intruder", "namespace": namespace}
            intruder["spec"]["priorityClassName"] = f"urgent-{namespace}"
            await asyncio.to_thread(scene.core.create_namespaced_pod, namespace, intruder)
            exited = await scene.next(WorkerExited)
            assert exited.cause is ExitCause.PREEMPTED
            assert "intruder" in exited.detail
            await asyncio.to_thread(scene.core.delete_namespaced_pod, "intruder", namespace, grace_period_seconds=0)

    play(story)


@pytest.mark.parametrize("grace", [None, 0])
def test_a_pod_that_somebody_deletes(play, grace):
    async def story(scene):
        await scene.placed(0)
        await scene.delete(0, grace)
        exited = await scene.next(WorkerExited)
        assert (exited.cause, exited.detail) == (ExitCause.DELETED, f"somebody deleted pod {JOB}-worker-0")

    play(story)


def test_the_reason_to_wait_is_the_schedulers(play):
    async def story(scene):
        await scene.launcher.launch(0)
        while "Insufficient nvidia.com/gpu" not in (await scene.next(WorkerPending)).reason:
            continue

    play(story, gpus=50)


def test_an_api_server_that_is_away_for_a_while_costs_nothing(play, own_cluster):
    async def story(scene):
        await scene.placed(0)
        away = asyncio.create_task(asyncio.to_thread(own_cluster.restart_api_server, 2.0))
        await asyncio.sleep(0)
        await scene.launcher.launch(1)
        scene.launcher.terminate(0)
        await away
        told = set()
        while not {(WorkerExited, 0), (WorkerPlaced, 1)} <= told:
            report = await asyncio.wait_for(scene.reports.get(), DEADLINE)
            told.add((type(report), report.worker_id))
        scene.launcher.kill(1)

    play(story)


def test_another_master_takes_over_what_it_finds(play):
    async def story(scene):
        await scene.placed(3, 4)
        await scene.launcher.detach()
        scene.launcher = scene.another()
        found = await scene.launcher.find()
        assert {worker.worker_id for worker in found} == {3, 4}
        assert all(worker.host and worker.pid for worker in found)
        with pytest.raises(ValueError, match="4"):
            await scene.launcher.launch(4)
        await scene.delete(3)
        assert (await scene.next(WorkerExited)).worker_id == 3
        scene.launcher.kill(4)
        assert (await scene.next(WorkerExited)).cause is ExitCause.KILLED

    play(story)


def test_a_pod_whose_master_died_before_it_heard_of_it_is_taken_over(play):
    async def story(scene):
        await scene.placed(5)
        await asyncio.to_thread(scene.core.create_namespaced_pod, scene.namespace, scene.pods.manifest(6, 1))
        await scene.launcher.launch(6)  # its name is taken, by itself
        assert (await scene.next(WorkerPlaced)).worker_id == 6

    play(story)


def test_a_lost_node_is_told_from_a_deletion(play, own_cluster):
    async def story(scene):
        await scene.placed(0)
        pod = await asyncio.to_thread(scene.core.read_namespaced_pod, f"{JOB}-worker-0", scene.namespace)
        node = pod.spec.node_name
        await asyncio.to_thread(own_cluster.lose_node, node)
        try:
            while True:  # until the control plane has noticed
                pod = await asyncio.to_thread(scene.core.read_namespaced_pod, f"{JOB}-worker-0", scene.namespace)
                if any(each.type == "Ready" and each.status == "False" for each in pod.status.conditions):
                    break
                await asyncio.sleep(0.5)
            scene.launcher.kill(0)
            assert (await scene.next(WorkerExited)).cause is ExitCause.NODE_LOST
        finally:
            await asyncio.to_thread(own_cluster.add_node, node, 3)

    play(story)


def test_a_worker_is_controlled_so_that_its_node_can_be_drained_and_goes_with_the_job(play, namespace):
    """The Job itself would disown a pod that it controls and has not started."""

    async def story(scene):
        await scene.placed(0)
        pod = await asyncio.to_thread(scene.core.read_namespaced_pod, f"{JOB}-worker-0", namespace)
        assert [(each.kind, each.controller) for each in pod.metadata.owner_references] == [
            ("Job", None),
            ("ConfigMap", True),
        ]
        jobs = client.BatchV1Api(scene.api)
        options = {"propagation_policy": "Background"}
        await asyncio.to_thread(jobs.delete_namespaced_job, f"{JOB}-master", namespace, **options)
        assert (await scene.next(WorkerExited)).cause is ExitCause.DELETED

    play(story)


def test_nobody_is_found_at_first(play):
    async def story(scene):
        assert await scene.launcher.find() == ()

    play(story, found=True)


def test_of_pods_that_are_over_the_newest_are_left(own_cluster, namespace, tmp_path):
    """Failed and completed, and none that runs."""

    async def run():
        reports, pods = asyncio.Queue(), worker_pods(own_cluster, namespace, tmp_path)
        api = api_of(own_cluster)
        launcher = make_launcher(api, pods, reports.put_nowait, Patience(over=0.0))

        async def there():
            found = await asyncio.to_thread(client.CoreV1Api(api).list_namespaced_pod, namespace)
            return sorted(each.metadata.name for each in found.items)

        async def until(kind):
            while not isinstance(await asyncio.wait_for(reports.get(), DEADLINE), kind):
                pass

        try:
            await launcher.find()
            await launcher.launch(0)
            await until(WorkerPlaced)
            for worker_id in range(1, KEPT + 3):
                await launcher.launch(worker_id)
                await until(WorkerPlaced)
                (tmp_path / f".{worker_id}").write_text(str(worker_id % 2))
                (tmp_path / f".{worker_id}").rename(tmp_path / str(worker_id))
                await until(WorkerExited)
            async with asyncio.timeout(DEADLINE):
                while len(left := await there()) > 1 + KEPT:
                    await asyncio.sleep(0.1)
            assert left == [f"{JOB}-worker-{worker_id}" for worker_id in (0, *range(3, KEPT + 3))]
        finally:
            await launcher.close()

    asyncio.run(run())
