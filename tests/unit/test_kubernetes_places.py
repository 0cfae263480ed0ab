"""Pods as places, and their watches, when the API server refuses, forgets, answers late or not at all."""

import asyncio
import random
import threading

import pytest
from kubernetes_fake import FakeObjects, FakePods
from kubernetes_kit import JOB, PODS, RUNNING, condition, event, pod, terminated, waiting

from elasticdl.common.errors import UnreachableError
from elasticdl.kube.api_error import ApiError
from elasticdl.master.state.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.pods.pod_places import PodPlaces, PodTimeouts
from elasticdl.places.pods.worker_pods import number_of

DEADLINE = 20.0
QUICK = PodTimeouts(
    image=0.05, event=0.02, force=0.05, leave=0.05, close=5.0, start=0.3, first_retry=0.01, longest_retry=0.02
)
GONE = ApiError(410, "too old resource version")


class Scene:
    def __init__(self, timeouts):
        self.timeouts = timeouts
        self.objects, self.events = FakeObjects(), FakeObjects()
        self.pods = FakePods(self.objects, self.events)
        self.reports = asyncio.Queue()
        self.places = self.another()

    def another(self):
        return PodPlaces(self.pods, PODS, self.reports.put_nowait, self.timeouts, random.Random(1))

    def want(self, most, *avoid):
        self.places.want(most, frozenset(avoid))

    async def next(self, kind):
        """The next report, but for those which say only that a place is asked for."""
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        if isinstance(report, PlaceChanged) and report.place == Place(report.place.id):
            return await self.next(kind)
        assert isinstance(report, kind), report
        return report

    async def changed(self, number, state):
        place = (await self.next(PlaceChanged)).place
        assert (place.id, place.state) == (f"{JOB}-worker-{number}", state), place
        return place

    async def waits(self, number=0):
        return (await self.changed(number, PlaceState.WAITING)).reason

    async def lost(self, number=0):
        lost = await self.next((PlaceLost, PlaceChanged))
        if isinstance(lost, PlaceChanged):  # first it may be told that it ends
            assert lost.place.state is PlaceState.ENDING, lost
            lost = await self.next(PlaceLost)
        assert lost.place_id == f"{JOB}-worker-{number}", lost
        return lost

    def give_back(self, number, *, at_once=True):
        self.places.give_back(f"{JOB}-worker-{number}", at_once=at_once)

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

    async def ready(self, count):
        self.want(count)
        for number in range(count):
            while f"{JOB}-worker-{number}" not in self.objects.objects:
                await asyncio.sleep(0)
            self.show(number)
            await self.changed(number, PlaceState.READY)


@pytest.fixture
def play():
    def run(story, timeouts=QUICK, *, found=False):
        """``found``: the story itself asks what there is."""

        async def whole():
            scene = Scene(timeouts)
            try:
                if not found:
                    await scene.places.found()
                await story(scene)
            finally:
                await scene.places.close()

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
        scene.want(1)
        assert await scene.waits() == f"the cluster does not take its pod: {failure}".replace(
            'pods "x" is forbidden: ', ""
        )
        await scene.called("create", f"{JOB}-worker-0", times=3)
        assert await scene.waits() == "the scheduler has not looked at it yet"
        scene.show(0)
        await scene.changed(0, PlaceState.READY)

    play(story)


def test_a_pod_that_no_cluster_would_take_ends_the_job_with_that_line(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(422, 'Pod "x" is invalid: spec.volumes[0]')]
        scene.want(1)
        assert (await scene.next(LauncherFailed)).reason.endswith('Pod "x" is invalid: spec.volumes[0]')
        assert (await scene.lost()).cause is ExitCause.CRASHED

    play(story)


def test_a_pod_of_which_the_answer_was_lost_is_taken_for_ours(play):
    async def story(scene):
        scene.pods.create_unheard(PODS.manifest(0, 0))
        scene.want(1)
        await scene.waits()  # the connection broke
        await scene.called("read", f"{JOB}-worker-0")
        await scene.waits()
        scene.show(0)
        await scene.changed(0, PlaceState.READY)

    play(story)


def test_a_pod_of_an_older_job_of_the_name_is_waited_for(play):
    async def story(scene):
        scene.objects.put(f"{JOB}-worker-0", {**pod(0), "metadata": {**pod(0)["metadata"], "ownerReferences": []}})
        scene.want(1)
        assert "there still is a pod digits-worker-0 of another job" in await scene.waits()
        scene.objects.put(f"{JOB}-worker-0", pod(0), "DELETED")
        await scene.called("create", f"{JOB}-worker-0", times=2)

    play(story)


def test_a_worker_that_is_killed_while_it_is_asked_for_is_never_made(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(403, "exceeded quota")] * 1000
        scene.want(1)
        await scene.waits()
        scene.give_back(0)
        lost = await scene.lost()
        assert (lost.cause, lost.detail) == (ExitCause.KILLED, "it had no place yet")
        assert ("delete", f"{JOB}-worker-0", 1) not in scene.pods.calls

    play(story)


def test_a_worker_that_may_have_been_made_is_deleted_in_any_case(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(0, "timed out")] * 1000
        scene.want(1)
        await scene.waits()
        scene.give_back(0, at_once=False)
        assert await scene.lost()
        await scene.called("delete", f"{JOB}-worker-0", 1)

    play(story)


def test_a_pod_that_its_node_does_not_end_is_forced_off_the_books(play):
    async def story(scene):
        await scene.ready(1)
        scene.pods.lingering = True
        scene.give_back(0)
        await scene.called("delete", f"{JOB}-worker-0", 0)
        assert (await scene.lost()).cause is ExitCause.KILLED
        scene.pods.lingering = False

    play(story)


def test_deleting_goes_on_until_the_server_has_heard(play):
    async def story(scene):
        await scene.ready(1)
        scene.pods.failures["delete"] = [ApiError(503, "x"), ApiError(0, "y"), ApiError(429, "z")]
        scene.give_back(0, at_once=False)
        assert (await scene.lost()).cause is ExitCause.KILLED
        await scene.called("delete", f"{JOB}-worker-0", None, times=4)

    play(story)


@pytest.mark.parametrize(
    ("failure", "forget"),
    [(None, False), (ApiError(0, "connection reset"), False), (GONE, True), (ApiError(500, "x"), False)],
)
def test_what_happens_between_two_watches_is_told_once(play, failure, forget):
    async def story(scene):
        await scene.ready(2)
        lists = scene.objects.lists
        with scene.objects.lock:
            scene.objects.interrupt(*([failure] if failure else []), forget=forget)
            scene.show(0, "Failed", terminated(3))
            if forget:
                scene.objects.history = []
                scene.objects.failures = [GONE] if scene.objects.lists == lists else []
        assert (await scene.lost()).code == 3
        scene.show(1, "Succeeded", terminated(0))
        assert (await scene.lost(1)).cause is ExitCause.CLEAN
        assert scene.reports.empty()
        assert (scene.objects.lists > lists) == forget

    play(story)


def test_a_pod_that_went_while_nobody_watched_is_missed(play):
    async def story(scene):
        await scene.ready(2)
        with scene.objects.lock:
            scene.objects.interrupt(GONE)
            scene.remove(0)
            scene.objects.history = []
        lost = await scene.lost()
        assert lost.cause is ExitCause.DELETED
        assert 1 in scene.places._ledger

    play(story)


def test_a_server_that_is_away_is_asked_again(play):
    async def story(scene):
        await scene.ready(1)
        scene.objects.failures = [ApiError(0, "refused")] * 3 + [GONE, ApiError(503, "starting")]
        scene.objects.interrupt()
        scene.show(0, "Failed", terminated(137, "OOMKilled"))
        assert (await scene.lost()).cause is ExitCause.OUT_OF_MEMORY
        assert scene.objects.failures == []

    play(story)


def test_an_event_says_who_deleted_a_pod_also_when_it_comes_last(play):
    async def story(scene):
        await scene.ready(1)
        uid = scene.objects.objects[f"{JOB}-worker-0"]["metadata"]["uid"]
        scene.remove(0)
        scene.events.put("e", event("Preempted", "Preempted by x", uid=uid))
        assert (await scene.lost()).cause is ExitCause.PREEMPTED

    play(story, PodTimeouts(event=DEADLINE))


def test_an_image_that_can_not_be_pulled_ends_a_job_that_never_had_a_worker(play):
    async def story(scene):
        scene.want(1)
        await scene.called("create", f"{JOB}-worker-0")
        while not scene.objects.objects:
            await asyncio.sleep(0)
        scene.show(0, "Pending", waiting("ErrImagePull", "not found"))
        assert await scene.waits() == "the image can't be pulled: not found"
        failed = await scene.next(LauncherFailed)
        assert failed.reason == "no worker could be started within 0.05 s: the image can't be pulled: not found"

    play(story)


def test_an_image_that_runs_as_root_ends_a_job_at_once_with_the_remedy(play):
    async def story(scene):
        scene.want(1)
        await scene.called("create", f"{JOB}-worker-0")
        while not scene.objects.objects:
            await asyncio.sleep(0)
        said = "container has runAsNonRoot and image will run as root"
        scene.show(0, "Pending", waiting("CreateContainerConfigError", said))
        assert "Dockerfile with `USER 1000`" in await scene.waits()
        assert (await scene.next(LauncherFailed)).reason.startswith("no worker can be started: nothing may run as root")

    play(story, PodTimeouts(image=DEADLINE))


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
        assert await scene.places.found() == ()
        scene.objects.put(name, strange)
        await scene.ready(1)
        assert not [call for call in scene.pods.calls if call[0] == "delete"]

    play(story, found=True)


def test_what_a_master_before_has_left_is_found_and_then_told(play):
    async def story(scene):
        await scene.ready(2)
        await scene.places.detach()
        scene.show(0, "Failed", terminated(3))
        scene.pods._create(PODS.manifest(7, 2))
        scene.places = scene.another()
        over, runs, waits = await scene.places.found()
        assert scene.reports.empty()
        assert (over.id, over.state) == (f"{JOB}-worker-0", PlaceState.LOST)
        log = f"kubectl logs -n lab {JOB}-worker-1"
        assert runs == Place(f"{JOB}-worker-1", "n0", state=PlaceState.READY, log=log)
        assert waits == Place(f"{JOB}-worker-7", reason="the scheduler has not looked at it yet")
        await scene.lost(0)
        scene.show(7)
        await scene.changed(7, PlaceState.READY)
        scene.want(3)
        await scene.called("create", f"{JOB}-worker-8")  # no name is used again

    play(story)


def test_in_a_pod_that_may_never_be_heard_of_again_nobody_is_started(play):
    """Its node does not answer, or it is being deleted."""

    async def story(scene):
        await scene.ready(3)
        scene.show(0, conditions=[condition("Ready", "False")])
        scene.show(1, deleted=True)
        assert (await scene.changed(0, PlaceState.ENDING)).reason == "node n0 does not answer"
        assert (await scene.changed(1, PlaceState.ENDING)).reason == "its pod is being deleted"
        await scene.places.detach()
        scene.places = scene.another()
        states = [place.state for place in await scene.places.found()]
        assert states == [PlaceState.ENDING, PlaceState.ENDING, PlaceState.READY]
        scene.show(0)
        await scene.changed(0, PlaceState.READY)

    play(story)


def test_a_pod_that_a_master_before_has_asked_for_and_that_comes_late_is_a_place_as_well(play):
    async def story(scene):
        await scene.ready(1)
        scene.pods._create(PODS.manifest(7, 1))
        await scene.waits(7)
        scene.want(2)
        scene.show(7)
        await scene.changed(7, PlaceState.READY)
        assert [number_of(each) for each in scene.objects.objects.values()] == [0, 7]

    play(story)


def test_who_waits_is_dropped_the_newest_first_and_who_runs_is_not(play):
    async def story(scene):
        await scene.ready(1)
        scene.want(3)
        await scene.called("create", f"{JOB}-worker-2")
        scene.want(2)
        await scene.lost(2)
        scene.want(0)
        await scene.lost(1)
        scene.want(0)
        assert list(scene.objects.objects) == [f"{JOB}-worker-0"]

    play(story)


def test_a_job_that_ends_lets_its_agents_leave_so_that_their_logs_stay(play):
    async def story(scene):
        await scene.ready(1)
        closing = asyncio.ensure_future(scene.places.close())
        await asyncio.sleep(0)
        scene.show(0, "Succeeded", terminated(0))
        await closing
        assert not [call for call in scene.pods.calls if call[0] == "delete_all"]
        assert list(scene.objects.objects) == [f"{JOB}-worker-0"]

    play(story, PodTimeouts(leave=DEADLINE))


def test_a_pod_that_comes_after_it_was_given_up_is_deleted(play):
    async def story(scene):
        scene.pods.failures["create"] = [ApiError(0, "timed out")] * 1000
        scene.want(1)
        await scene.waits()
        scene.give_back(0)
        await scene.lost()
        scene.pods._create(PODS.manifest(0, 0))
        await scene.called("delete", f"{JOB}-worker-0", 1, times=2)

    play(story)


def test_a_container_beside_the_worker_is_ended_with_it(play):
    async def story(scene):
        await scene.ready(1)
        name = f"{JOB}-worker-0"
        known = scene.objects.objects[name]
        known["spec"]["containers"] = [*known["spec"]["containers"], {"name": "sidecar"}]
        scene.show(0, "Running", terminated(0))
        assert (await scene.lost()).cause is ExitCause.CLEAN
        await scene.called("delete", name, 1)

    play(story)


def test_a_cluster_that_never_answers_is_unreachable(play):
    async def story(scene):
        scene.objects.failures = [ApiError(0, "refused")] * 1000
        with pytest.raises(UnreachableError, match="can't list the workers' pods: refused"):
            await scene.places.found()

    play(story, found=True)


def test_closing_waits_until_all_is_gone_and_is_bounded(play):
    async def story(scene):
        await scene.ready(2)
        scene.pods.failures["delete_all"] = [ApiError(503, "x")]
        await scene.places.close()
        for number in range(2):
            await scene.lost(number)
        assert scene.objects.objects == {}

    play(story)

    async def hopeless(scene):
        await scene.ready(1)
        scene.pods.failures["delete_all"] = [ApiError(503, "x")] * 1000
        await scene.places.close()
        assert scene.reports.empty()

    play(hopeless, PodTimeouts(leave=0.01, close=0.1, first_retry=0.01, longest_retry=0.02))
