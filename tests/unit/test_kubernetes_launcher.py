"""The launcher and its watches when the API server refuses, forgets, answers late or not at all."""

import asyncio
import random
import threading

import pytest
from kubernetes_fake import FakeObjects, FakePods
from kubernetes_kit import JOB, PODS, RUNNING, condition, event, pod, terminated, waiting

from elasticdl.common.errors import UnreachableError
from elasticdl.kube.api_error import ApiError
from elasticdl.master.state.events import (
    ExitCause,
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)
from elasticdl.places.pods import launcher
from elasticdl.places.pods.launcher import REQUESTS_AT_ONCE, KubernetesLauncher, Patience
from elasticdl.places.pods.worker_pods import worker_id_of

DEADLINE = 20.0
QUICK = Patience(image=0.05, event=0.02, force=0.05, close=5.0, start=0.3, first_retry=0.01, longest_retry=0.02)
GONE = ApiError(410, "too old resource version")


class Scene:
    def __init__(self, patience):
        self.patience = patience
        self.objects, self.events = FakeObjects(), FakeObjects()
        self.pods = FakePods(self.objects, self.events)
        self.reports = asyncio.Queue()
        self.launcher = self.another()

    def another(self):
        return KubernetesLauncher(self.pods, PODS, self.reports.put_nowait, self.patience, random.Random(1))

    async def next(self, wanted):
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        assert isinstance(report, wanted), report
        return report

    async def called(self, *call, times=1):
        """Wait until a request was made so often."""

        def wait():
            with self.pods.called:
                return self.pods.called.wait_for(lambda: self.pods.calls.count(call) >= times, DEADLINE)

        assert await asyncio.to_thread(wait), self.pods.calls

    def show(self, worker_id, phase="Running", state=RUNNING, **more):
        """The cluster sets the status of a worker's pod."""
        name = f"{JOB}-worker-{worker_id}"
        known = self.objects.objects[name]
        made = pod(worker_id, phase, state, manifest=known, **more)
        made["metadata"]["uid"] = known["metadata"]["uid"]
        self.objects.put(name, made)

    def remove(self, worker_id):
        name = f"{JOB}-worker-{worker_id}"
        self.objects.put(name, self.objects.objects[name], "DELETED")

    async def placed(self, *ids):
        for worker_id in ids:
            await self.launcher.launch(worker_id)
            await self.called("create", f"{JOB}-worker-{worker_id}")
            while f"{JOB}-worker-{worker_id}" not in self.objects.objects:
                await asyncio.sleep(0)
            self.show(worker_id)
            assert (await self.next(WorkerPlaced)).worker_id == worker_id


@pytest.fixture
def play():
    def run(story, patience=QUICK, *, found=False):
        """``found``: the story itself asks what there is."""

        async def whole():
            scene = Scene(patience)
            try:
                if not found:
                    await scene.launcher.find()
                await story(scene)
            finally:
                await scene.launcher.close()

        asyncio.run(whole())
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]

    return run


@pytest.mark.parametrize(
    "failure",
    [
        ApiError(403, 'pods "x" is forbidden: exceeded quota: team'),
        ApiError(429, "too many requests", retry_after=0.02),
        ApiError(500, "etcdserver: request timed out"),
        ApiError(0, "the cluster does not answer: connection refused"),
        ApiError(400, "failed to create pod <lab/digits-worker-0> as the podgroup phase is Pending"),
    ],
)
def test_a_pod_that_is_refused_for_now_is_asked_for_again(play, failure):
    async def story(scene):
        scene.pods.failures["create"] = [failure, failure]
        await scene.launcher.launch(0)
        pending = await scene.next(WorkerPending)
        assert pending.reason == f"the cluster does not take its pod: {failure}".replace('pods "x" is forbidden: ', "")
        await scene.called("create", f"{JOB}-worker-0", times=3)
        assert (await scene.next(WorkerPending)).reason == "the scheduler has not looked at it yet"
        scene.show(0)
        await scene.next(WorkerPlaced)

    play(story)


def test_a_pod_that_no_cluster_would_take_ends_the_job_with_that_line(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(422, 'Pod "x" is invalid: spec.volumes[0]')]
        await scene.launcher.launch(0)
        assert (await scene.next(LauncherFailed)).reason.endswith('Pod "x" is invalid: spec.volumes[0]')
        assert (await scene.next(WorkerExited)).cause is ExitCause.CRASHED

    play(story)


def test_a_pod_of_which_the_answer_was_lost_is_taken_for_ours(play):
    async def story(scene):
        scene.pods.create_unheard(PODS.manifest(0, 0))
        await scene.launcher.launch(0)
        await scene.next(WorkerPending)  # the connection broke
        await scene.called("read", f"{JOB}-worker-0")
        await scene.next(WorkerPending)
        scene.show(0)
        await scene.next(WorkerPlaced)

    play(story)


def test_a_pod_of_an_older_job_of_the_name_is_waited_for(play):
    async def story(scene):
        scene.objects.put(f"{JOB}-worker-0", {**pod(0), "metadata": {**pod(0)["metadata"], "ownerReferences": []}})
        await scene.launcher.launch(0)
        assert "there still is a pod digits-worker-0 of another job" in (await scene.next(WorkerPending)).reason
        scene.objects.put(f"{JOB}-worker-0", pod(0), "DELETED")
        await scene.called("create", f"{JOB}-worker-0", times=2)

    play(story)


def test_a_worker_that_is_killed_while_it_is_asked_for_is_never_made(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(403, "exceeded quota")] * 1000
        await scene.launcher.launch(0)
        await scene.next(WorkerPending)
        scene.launcher.kill(0)
        exited = await scene.next(WorkerExited)
        assert (exited.cause, exited.detail) == (ExitCause.KILLED, "it had no place yet")
        assert ("delete", f"{JOB}-worker-0", 1) not in scene.pods.calls

    play(story)


def test_a_worker_that_may_have_been_made_is_deleted_in_any_case(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(0, "timed out")] * 1000
        await scene.launcher.launch(0)
        await scene.next(WorkerPending)
        scene.launcher.terminate(0)
        assert (await scene.next(WorkerExited)).worker_id == 0
        await scene.called("delete", f"{JOB}-worker-0", 1)

    play(story)


def test_a_pod_that_its_node_does_not_end_is_forced_off_the_books(play):
    async def story(scene):
        await scene.placed(0)
        scene.pods.lingering = True
        scene.launcher.kill(0)
        await scene.called("delete", f"{JOB}-worker-0", 0)
        assert (await scene.next(WorkerExited)).cause is ExitCause.KILLED
        scene.pods.lingering = False

    play(story)


def test_deleting_goes_on_until_the_server_has_heard(play):
    async def story(scene):
        await scene.placed(0)
        scene.pods.failures["delete"] = [ApiError(503, "x"), ApiError(0, "y"), ApiError(429, "z")]
        scene.launcher.terminate(0)
        assert (await scene.next(WorkerExited)).cause is ExitCause.KILLED
        await scene.called("delete", f"{JOB}-worker-0", None, times=4)

    play(story)


@pytest.mark.parametrize(
    ("failure", "forget"),
    [(None, False), (ApiError(0, "connection reset"), False), (GONE, True), (ApiError(500, "x"), False)],
)
def test_what_happens_between_two_watches_is_told_once(play, failure, forget):
    async def story(scene):
        await scene.placed(0, 1)
        lists = scene.objects.lists
        with scene.objects.lock:
            scene.objects.interrupt(*([failure] if failure else []), forget=forget)
            scene.show(0, "Failed", terminated(3))
            if forget:
                scene.objects.history = []
                scene.objects.failures = [GONE] if scene.objects.lists == lists else []
        assert (await scene.next(WorkerExited)).code == 3
        scene.show(1, "Succeeded", terminated(0))
        assert (await scene.next(WorkerExited)).cause is ExitCause.CLEAN
        assert scene.reports.empty()
        assert (scene.objects.lists > lists) == forget

    play(story)


def test_a_pod_that_went_while_nobody_watched_is_missed(play):
    async def story(scene):
        await scene.placed(0, 1)
        with scene.objects.lock:
            scene.objects.interrupt(GONE)
            scene.remove(0)
            scene.objects.history = []
        exited = await scene.next(WorkerExited)
        assert (exited.worker_id, exited.cause) == (0, ExitCause.DELETED)
        assert 1 in scene.launcher._ledger

    play(story)


def test_a_server_that_is_away_is_asked_again(play):
    async def story(scene):
        await scene.placed(0)
        scene.objects.failures = [ApiError(0, "refused")] * 3 + [GONE, ApiError(503, "starting")]
        scene.objects.interrupt()
        scene.show(0, "Failed", terminated(137, "OOMKilled"))
        assert (await scene.next(WorkerExited)).cause is ExitCause.OUT_OF_MEMORY
        assert scene.objects.failures == []

    play(story)


def test_an_event_says_who_deleted_a_pod_also_when_it_comes_last(play):
    async def story(scene):
        await scene.placed(0)
        uid = scene.objects.objects[f"{JOB}-worker-0"]["metadata"]["uid"]
        scene.remove(0)
        scene.events.put("e", event("Preempted", "Preempted by x", uid=uid))
        assert (await scene.next(WorkerExited)).cause is ExitCause.PREEMPTED

    play(story, Patience(event=DEADLINE))


def test_an_image_that_can_not_be_pulled_ends_a_job_that_never_had_a_worker(play):
    async def story(scene):
        await scene.launcher.launch(0)
        await scene.called("create", f"{JOB}-worker-0")
        while not scene.objects.objects:
            await asyncio.sleep(0)
        scene.show(0, "Pending", waiting("ErrImagePull", "not found"))
        assert (await scene.next(WorkerPending)).reason == "the image can't be pulled: not found"
        failed = await scene.next(LauncherFailed)
        assert failed.reason == "no worker could be started within 0.05 s: the image can't be pulled: not found"

    play(story)


def test_an_image_that_runs_as_root_ends_a_job_at_once_with_the_remedy(play):
    async def story(scene):
        await scene.launcher.launch(0)
        await scene.called("create", f"{JOB}-worker-0")
        while not scene.objects.objects:
            await asyncio.sleep(0)
        said = "container has runAsNonRoot and image will run as root"
        scene.show(0, "Pending", waiting("CreateContainerConfigError", said))
        assert "Dockerfile with `USER 1000`" in (await scene.next(WorkerPending)).reason
        assert (await scene.next(LauncherFailed)).reason.startswith("no worker can be started: nothing may run as root")

    play(story, Patience(image=DEADLINE))


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {"elasticdl.org/worker": "abc"}},
        {"labels": {"elasticdl.org/worker": "1", "elasticdl.org/place": "first"}},
        {"labels": {}},
        {"name": "somebody-elses"},
    ],
)
def test_a_pod_of_somebody_elses_making_that_the_job_owns_is_left_alone(play, metadata):
    """As a service mesh's, or a mistake: a master that were to crash on it would do so again and again."""

    async def story(scene):
        name = metadata.get("name", f"{JOB}-worker-1")
        strange = pod(1, "Running", RUNNING)
        strange["metadata"] = {**strange["metadata"], "name": name, **metadata}
        scene.objects.put(name, strange)
        assert await scene.launcher.find() == ()
        scene.objects.put(name, strange)
        await scene.placed(0)
        assert not [call for call in scene.pods.calls if call[0] == "delete"]

    play(story, found=True)


def test_what_a_master_before_has_left_is_found_and_then_told(play):
    async def story(scene):
        await scene.placed(3, 4)
        await scene.launcher.detach()
        scene.show(3, "Failed", terminated(3))
        scene.pods._create(PODS.manifest(5, 2))
        scene.launcher = scene.another()
        found = await scene.launcher.find()
        assert scene.reports.empty()
        assert set(found) == {FoundWorker(3, over=True), FoundWorker(4, "10.0.0.7", 1, node="n0"), FoundWorker(5)}
        assert (await scene.next(WorkerExited)).worker_id == 3
        scene.show(5)
        assert (await scene.next(WorkerPlaced)).worker_id == 5

    play(story)


def test_a_worker_on_a_node_that_does_not_answer_is_found_and_doubted(play):
    async def story(scene):
        await scene.placed(3, 4, 5)
        await scene.launcher.detach()
        scene.show(3, conditions=[condition("Ready", "False")])
        scene.show(4, deleted=True)
        scene.launcher = scene.another()
        assert {found.worker_id for found in await scene.launcher.find() if found.doubtful} == {3, 4}

    play(story)


def test_a_pod_that_comes_late_from_a_master_that_is_gone_is_deleted(play):
    async def story(scene):
        await scene.placed(8)
        scene.pods._create(PODS.manifest(7, 1))
        await scene.called("delete", f"{JOB}-worker-7", 1)
        scene.pods._create(PODS.manifest(9, 1))  # may be of one that follows us
        scene.show(9)
        scene.show(8, "Succeeded", terminated(0))
        await scene.next(WorkerExited)
        assert [worker_id_of(each) for each in scene.objects.objects.values()] == [8, 9]

    play(story)


def test_a_pod_that_comes_after_it_was_given_up_is_deleted(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(0, "timed out")] * 1000
        await scene.launcher.launch(0)
        await scene.next(WorkerPending)
        scene.launcher.kill(0)
        await scene.next(WorkerExited)
        scene.pods._create(PODS.manifest(0, 0))
        await scene.called("delete", f"{JOB}-worker-0", 1, times=2)

    play(story)


def test_a_container_beside_the_worker_is_ended_with_it(play):
    async def story(scene):
        await scene.placed(0)
        name = f"{JOB}-worker-0"
        known = scene.objects.objects[name]
        known["spec"]["containers"] = [*known["spec"]["containers"], {"name": "sidecar"}]
        scene.show(0, "Running", terminated(0))
        assert (await scene.next(WorkerExited)).cause is ExitCause.CLEAN
        await scene.called("delete", name, 1)

    play(story)


def test_a_cluster_that_never_answers_is_unreachable(play):
    async def story(scene):
        scene.objects.failures = [ApiError(0, "refused")] * 1000
        with pytest.raises(UnreachableError, match="can't list the workers' pods: refused"):
            await scene.launcher.find()

    play(story, found=True)


def test_closing_waits_until_all_is_gone_and_is_bounded(play):
    async def story(scene):
        await scene.placed(0, 1)
        scene.pods.failures["delete_all"] = [ApiError(503, "x")]
        await scene.launcher.close()
        assert [type(scene.reports.get_nowait()) for _ in range(2)] == [WorkerExited] * 2
        assert scene.objects.objects == {}

    play(story)

    async def hopeless(scene):
        await scene.placed(0)
        scene.pods.failures["delete_all"] = [ApiError(503, "x")] * 1000
        await scene.launcher.close()
        assert scene.reports.empty()

    play(hopeless, Patience(close=0.1, first_retry=0.01, longest_retry=0.02))


def test_where_a_worker_stands_is_in_its_log_if_that_may_be_read(play):
    async def story(scene):
        await scene.placed(0)
        name = f"{JOB}-worker-0"
        scene.pods.logs[name] = "Timeout (0:00:04)!"
        scene.launcher.read_stacks(0)
        assert await scene.next(StacksFound) == StacksFound(0, "Timeout (0:00:04)!")
        scene.launcher.read_log(0)
        assert await scene.next(StacksFound) == StacksFound(0, "Timeout (0:00:04)!")
        scene.pods.failures["log"] = [ApiError(403, f'pods "{name}" is forbidden')]
        scene.launcher.read_stacks(0)
        found = await scene.next(StacksFound)
        assert (found.text, found.state) == ("", 'its log can\'t be read: pods "digits-worker-0" is forbidden')
        scene.launcher.read_stacks(7)
        assert scene.reports.empty()

    play(story)


def test_logs_that_do_not_come_hold_up_nobody(play, monkeypatch):
    """Those of the workers of a node that is lost. Their replacements must not wait for them."""
    monkeypatch.setattr(launcher, "STACKS_SECONDS", 0.2)

    async def story(scene):
        numbers = range(2 * REQUESTS_AT_ONCE)
        await scene.placed(*numbers)
        scene.pods.nodes_answer.clear()
        try:
            for worker_id in numbers:
                scene.launcher.read_stacks(worker_id)
            for _ in numbers:
                found = await scene.next(StacksFound)
                assert (found.text, found.state) == ("", "its node has not shown its log within 0.2 s")
            scene.launcher.kill(0)
            await scene.next(WorkerExited)
            await scene.launcher.launch(99)
            await scene.called("create", f"{JOB}-worker-99")
        finally:
            scene.pods.nodes_answer.set()

    play(story)
