"""How many requests a job makes of its cluster, whatever the cluster does to its pods."""

import asyncio
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_fake import FakeObjects, FakePods
from kubernetes_kit import JOB, PODS, pod, terminated

from elasticdl.common.backoff import Backoff
from elasticdl.job.spec import WorkerRange
from elasticdl.kube import budget
from elasticdl.kube.api_error import ApiError
from elasticdl.kube.budget import WriteBudget
from elasticdl.master.core.job_core import Job
from elasticdl.master.shell.agents import Agents
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.snapshot import JobSnapshot, WorkerSnapshot
from elasticdl.master.state.states import WorkerState
from elasticdl.master.state.values import Settings
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.pods.leftovers import KEPT, Leftovers
from elasticdl.places.pods.pod_places import REQUESTS_AT_ONCE, PodPlaces, PodTimeouts
from elasticdl.places.pods.shared_retry import SharedRetry

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
        def make_places(report):
            self.places = PodPlaces(self.pods, PODS, report, self.timeouts, random.Random(1))
            return self.places

        return PlaceLauncher(
            make_places,
            Agents(find_seconds=0.0, close_seconds=0.0).reporting_to,
            self.reports.put_nowait,
        )

    async def next(self):
        return await asyncio.wait_for(self.reports.get(), DEADLINE)

    def count(self, method):
        return sum(call[0] == method for call in self.pods.calls)

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await asyncio.sleep(0.005)


def on_stage(pods_class, story, **timeouts):
    async def whole():
        stage = Stage(pods_class(FakeObjects(), FakeObjects()), PodTimeouts(**timeouts))
        await stage.launcher.find({})
        try:
            await story(stage)
        finally:
            await stage.launcher.close()

    asyncio.run(whole())


@pytest.mark.parametrize(("workers", "most"), [(1, 10), (4, 20)])
def test_a_node_that_rejects_every_pod_costs_few_requests(workers, most):
    """80 seconds of the job's time, in which the cluster answers at once."""

    async def story(stage):
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
        await stage.until(lambda: len(stage.pods.objects.objects) == KEPT)
        assert len(stage.pods.calls) <= 3 * most
        assert "lost on node n1 before training, the last evicted: Pod was rejected" in job.view().reason
        last = max(stage.pods.objects.objects, key=lambda name: int(name.rpartition("-")[2]))
        avoiding = stage.pods.objects.objects[last]["spec"]["affinity"]["nodeAffinity"]
        assert "n1" in str(avoiding)

    on_stage(RejectingPods, story, over=0.0)


def test_all_workers_wait_for_a_quota_behind_one_back_off_and_follow_when_it_lets_one_in():
    async def story(stage):
        stage.pods.quota = 2
        for worker_id in range(40):
            await stage.launcher.launch(worker_id)
        waiting = set()
        while len(waiting) < 38:
            report = await stage.next()
            if isinstance(report, e.WorkerPending) and "exceeded quota" in report.reason:
                waiting.add(report.worker_id)
        # Two that were let in may each have let as many ask as may do so at once.
        refused = stage.count("create") - 2
        assert refused <= 3 * REQUESTS_AT_ONCE
        await stage.until(lambda: stage.count("create") - 2 >= refused + 3)
        stage.pods.quota = None
        await stage.until(lambda: len(stage.pods.objects.objects) == 40)
        assert stage.count("create") <= 40 + refused + 3 + REQUESTS_AT_ONCE

    on_stage(FakePods, story, first_retry=0.1, longest_retry=0.2)


def test_of_two_hundred_that_are_refused_for_20_seconds_one_asks_at_a_time():
    refusals, asked, now = SharedRetry(Backoff(longest=8.0)), 0, 0.0
    times = dict.fromkeys(range(200), 0.0)
    while min(times.values()) < 20:
        worker = min(times, key=times.get)
        now = times[worker]
        if wait := refusals.wait(now):
            times[worker] = now + wait
        else:
            asked += 1
            refusals.refused("quota", now)
            times[worker] = now + 0.1
    assert asked == 6
    refusals.succeeded()
    assert [refusals.wait(now) for _ in range(3)] == [0, 0, 0]


def test_at_the_end_all_pods_are_deleted_though_other_requests_wait_for_their_turn():
    may_go_on = threading.Event()

    class SlowPods(FakePods):
        def delete(self, name, grace):
            may_go_on.wait(DEADLINE)
            return super().delete(name, grace)

        def delete_all(self, grace):
            super().delete_all(grace)
            may_go_on.set()

    async def story(stage):
        for worker_id in range(REQUESTS_AT_ONCE + 1):
            await stage.launcher.launch(worker_id)
        await stage.until(lambda: len(stage.pods.objects.objects) == REQUESTS_AT_ONCE + 1)
        for worker_id in range(REQUESTS_AT_ONCE):
            stage.launcher.kill(worker_id)
        await asyncio.wait_for(stage.launcher.close(), DEADLINE / 2)
        assert may_go_on.is_set()

    on_stage(SlowPods, story)


def test_pods_of_a_gang_without_room_are_asked_for_more_and_more_seldom():
    async def story(stage):
        waits = ApiError(400, "failed to create pod as the podgroup phase is Pending")
        stage.pods.failures["create"] = [waits] * 1000
        for worker_id in range(4):
            await stage.launcher.launch(worker_id)
        refusals = stage.places._refusals
        await stage.until(lambda: stage.count("create") >= 8)
        assert refusals._backoff.failures >= 3, "each refusal doubles the wait of all"

    on_stage(FakePods, story, first_retry=0.01, longest_retry=0.02)


def test_pods_that_are_over_are_removed_up_to_the_newest():
    async def story(stage):
        for worker_id in range(KEPT + 2):
            await stage.launcher.launch(worker_id)
        await stage.until(lambda: len(stage.pods.objects.objects) == KEPT + 2)
        for worker_id in range(KEPT + 2):
            name = f"{JOB}-worker-{worker_id}"
            phase, end = ("Succeeded", terminated(0)) if worker_id % 2 else ("Failed", terminated(1))
            known = stage.pods.objects.objects[name]
            stage.pods.objects.put(name, pod(worker_id, phase, end, manifest=known))
            while not isinstance(await stage.next(), e.WorkerExited):
                pass
        await stage.until(lambda: len(stage.pods.objects.objects) == KEPT)
        left = sorted(stage.pods.objects.objects)
        assert left == [f"{JOB}-worker-{worker_id}" for worker_id in range(2, KEPT + 2)]

    on_stage(FakePods, story, over=0.0)


@given(st.lists(st.floats(0, 30), max_size=30))
def test_the_newest_that_are_over_are_kept_and_all_of_them_for_a_while(pauses):
    leftovers, since, now = Leftovers(60.0), {}, 0.0
    for worker_id, pause in enumerate(pauses):
        now += pause
        leftovers.add(worker_id, now)
        since[worker_id] = now
        for removed in leftovers.take(now):
            assert now - since.pop(removed) >= 60.0
    now += 1000.0
    assert leftovers.next(now) == (0.0 if len(since) > KEPT else None)
    assert leftovers.take(now) == list(since)[:-KEPT]
    assert (leftovers.take(now), leftovers.next(now)) == ([], None)


def test_a_job_that_was_scaled_may_change_as_much_at_once_as_one_that_began_so():
    slept, workers = [], 4
    it = WriteBudget(lambda: workers, clock=lambda: sum(slept), sleep=slept.append)
    for workers in (4, 100):
        slept.clear()
        for _ in range(budget.BURST + workers * budget.BURST_PER_WORKER):
            it.wait()
        assert not slept


def test_threads_that_wait_come_one_after_another():
    waiting = WriteBudget(lambda: 0, sleep=lambda seconds: None, clock=iter(range(10**6)).__next__)
    threads = [threading.Thread(target=waiting.wait) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)


def test_a_worker_whose_pod_is_over_when_the_next_master_comes_is_not_found():
    """Nobody knows any more which worker was in it: the master takes it for one that is gone without a word."""

    async def story(stage):
        await stage.launcher.launch(0)
        await stage.until(lambda: stage.pods.objects.objects)
        await stage.launcher.detach()
        (name, known), *_ = stage.pods.objects.objects.items()
        stage.pods.objects.put(name, pod(0, "Failed", terminated(137, "OOMKilled"), manifest=known))
        stage.launcher = stage.another()
        found = await stage.launcher.find({})
        assert found == []
        before = JobSnapshot(
            WorkerRange(minimum=1, maximum=1), next_id=1, workers=(WorkerSnapshot(0, WorkerState.MEMBER, ""),)
        )
        job = Job(Settings(before.limits, recovery_timeout=1.0), before)
        told = [*job.step(e.WorkersFound(tuple(found)), 0.0), *job.step(e.Tick(), 2.0)]
        assert [each.worker_id for each in told if isinstance(each, i.LaunchWorker)] == [1]
        await stage.launcher.launch(1)
        await stage.until(lambda: len(stage.pods.objects.objects) == 2)
        assert stage.reports.empty()

    on_stage(FakePods, story)
