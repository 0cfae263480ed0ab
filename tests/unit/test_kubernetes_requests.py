"""How many requests a job makes of its cluster, whatever the cluster does to its pods."""

import asyncio
import random
import threading
from contextlib import asynccontextmanager

import pytest
from kubernetes_fake import FakeObjects, FakePods
from kubernetes_kit import PODS

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings
from elasticdl.master.shell.agents import Agents
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.pod_places import KEPT, KILL_GRACE, REQUESTS_AT_ONCE, PodPlaces, PodTimeouts
from tests.stories import on

DEADLINE = 20.0


class RejectingPods(FakePods):
    """Each pod is bound to one node, whose kubelet refuses it."""

    def create(self, manifest):
        made = super().create(manifest)
        why = {"reason": "UnexpectedAdmissionError", "message": "Pod was rejected: Allocate failed"}
        spec = {**made["spec"], "nodeName": "n1"}
        self.objects.put(made["metadata"]["name"], {**made, "spec": spec, "status": {"phase": "Failed", **why}})
        return made


class Stage:
    """A launcher, and what it reports."""

    def __init__(self, pods, timeouts):
        self.pods = pods
        self.reports = asyncio.Queue()
        self.timeouts = timeouts
        self.launcher = self.another()

    def another(self):
        agents = Agents()
        agents.find_seconds = agents.soon_seconds = agents.close_seconds = 0.0
        return PlaceLauncher(self._make_places, agents.reporting_to, self.reports.put_nowait)

    def _make_places(self, report):
        self.places = PodPlaces(self.pods, PODS, report, self.timeouts, random.Random(1))
        return self.places

    async def next(self):
        return await asyncio.wait_for(self.reports.get(), DEADLINE)

    async def launch(self, count):
        for worker_id in range(count):
            await self.launcher.launch(worker_id)

    @property
    def names(self):
        return list(self.pods.objects.objects)

    def count(self, method):
        return sum(call[0] == method for call in self.pods.calls)

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await asyncio.sleep(0.005)


def stage(pods=FakePods, **timeouts):
    @asynccontextmanager
    async def opened():
        made = Stage(pods(FakeObjects()), PodTimeouts(**timeouts))
        await made.launcher.find({})
        try:
            yield made
        finally:
            await made.launcher.close()

    return opened


@pytest.mark.parametrize(("workers", "most"), [(1, 10), (4, 20)])
@on(stage(RejectingPods, over=0.05))
async def test_a_node_that_rejects_every_pod_costs_few_requests(stage, workers, most):
    """80 seconds of the job's time, in which the cluster answers at once."""
    job, now, running = Job(Settings(WorkerRange(minimum=1, maximum=workers))), 0.0, 0
    while now < 80:
        out = job.step(e.Tick(), now)
        while out or running:
            for each in out:
                if isinstance(each, i.LaunchWorker):
                    running += 1
                    await stage.launcher.launch(each.worker_id, each.away_from)
            out = []
            if running:
                report = await stage.next()
                running -= isinstance(report, e.WorkerExited)
                out = job.step(report, now)
        now += 0.5
    assert stage.count("create") <= most
    await stage.until(lambda: len(stage.names) == KEPT)
    assert len(stage.pods.calls) <= 3 * most
    assert "lost on node n1 before training, the last evicted: Pod was rejected" in job.reason
    last = max(stage.names, key=lambda name: int(name.rpartition("-")[2]))
    assert "n1" in str(stage.pods.objects.objects[last]["spec"]["affinity"]["nodeAffinity"])


@on(stage(first_retry=0.1, longest_retry=0.2))
async def test_all_workers_wait_for_a_quota_behind_one_back_off_and_follow_when_it_lets_one_in(stage):
    stage.pods.quota = 2
    await stage.launch(40)
    waiting = set()
    while len(waiting) < 38:
        report = await stage.next()
        if isinstance(report, e.WorkerPending) and "exceeded quota" in report.reason:
            waiting.add(report.worker_id)
    refused = stage.count("create") - 2
    assert refused <= 3, "one asks for all"
    await stage.until(lambda: stage.count("create") - 2 >= refused + 3)
    stage.pods.quota = None
    await stage.until(lambda: len(stage.names) == 40)
    assert stage.count("create") <= 40 + refused + 3 + 3


class SlowPods(FakePods):
    """What is to be deleted one by one waits for all to be deleted at once."""

    def __init__(self, *kinds):
        super().__init__(*kinds)
        self.may_go_on = threading.Event()

    def delete(self, name, grace):
        self.may_go_on.wait(DEADLINE)
        return super().delete(name, grace)

    def delete_all(self, grace):
        super().delete_all(grace)
        self.may_go_on.set()


@on(stage(SlowPods))
async def test_at_the_end_all_pods_are_deleted_though_other_requests_wait_for_their_turn(stage):
    await stage.launch(REQUESTS_AT_ONCE + 1)
    await stage.until(lambda: len(stage.names) == REQUESTS_AT_ONCE + 1)
    for worker_id in range(REQUESTS_AT_ONCE):
        stage.launcher.kill(worker_id)
    await asyncio.wait_for(stage.launcher.close(), DEADLINE / 2)
    assert stage.pods.may_go_on.is_set()


@on(stage(over=0.2))
async def test_the_newest_that_are_over_are_kept_and_all_of_them_for_a_while(stage):
    places, over, began = stage.places, KEPT + 2, asyncio.get_running_loop().time()
    await stage.launch(over)
    await stage.until(lambda: len(stage.names) == over)
    for number, each in enumerate(list(stage.names)):
        stage.pods.objects.put(each, {**stage.pods.objects.objects[each], "status": {"phase": "Failed"}})
        await stage.until(lambda number=number: number not in places._ledger)
    await stage.until(lambda: len(stage.names) < over)
    assert asyncio.get_running_loop().time() - began >= 0.2
    await stage.until(lambda: len(stage.names) == KEPT)
    assert [call[2] for call in stage.pods.calls if call[0] == "delete"] == [KILL_GRACE, KILL_GRACE]


@on(stage(first_retry=10.0))
async def test_workers_that_are_launched_one_by_one_are_asked_for_together(stage):
    """Else it takes a job of 10,000 workers minutes of its master's time."""
    asked = []
    ask = stage.places._ledger.ask
    stage.places._ledger.ask = lambda count: asked.append(count) or ask(count)
    stage.pods.quota = 0
    await stage.launch(100)
    await asyncio.sleep(0)
    assert asked == [100]
