"""Pods as places, and their watches, when the API server refuses, forgets, answers late or not at all."""

import asyncio
from functools import partial

import pytest
from kubernetes_kit import PODS, RUNNING, condition, pod, terminated, waiting
from kubernetes_scene import DEADLINE, name, pods_scene

from elasticdl.common.errors import UnreachableError
from elasticdl.kube.client import ApiError
from elasticdl.master.core.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceState
from elasticdl.places.pod_places import PodTimeouts
from elasticdl.places.worker_pods import number_of
from tests.stories import on

GONE = ApiError(410, "too old resource version")
FORBIDDEN = 'pods "x" is forbidden: '


@pytest.mark.parametrize(
    "failure",
    [
        ApiError(403, f"{FORBIDDEN}exceeded quota: team"),
        ApiError(429, "too many requests", retry_after=0.02),
        ApiError(500, "etcdserver: request timed out"),
        ApiError(0, "the cluster does not answer: connection refused"),
        ApiError(400, "failed to create pod <lab/digits-worker-0> as the podgroup phase is Pending"),
    ],
)
@on(pods_scene)
async def test_a_pod_that_is_refused_for_now_is_asked_for_again(scene, failure):
    scene.pods.failures["create"] = [failure, failure]
    scene.want(1)
    assert await scene.waits() == f"the cluster does not take its pod: {failure}".replace(FORBIDDEN, "")
    await scene.called("create", name(0), times=3)
    assert await scene.waits() == "the scheduler has not looked at it yet"
    scene.show(0)
    await scene.changed(0, PlaceState.READY)


@on(pods_scene)
async def test_a_pod_that_no_cluster_would_take_ends_the_job_with_that_line(scene):
    scene.pods.failures["create"] = [ApiError(422, 'Pod "x" is invalid: spec.volumes[0]')]
    scene.want(1)
    assert (await scene.next(LauncherFailed)).reason.endswith('Pod "x" is invalid: spec.volumes[0]')
    assert (await scene.lost()).cause is ExitCause.CRASHED


@on(pods_scene)
async def test_a_pod_of_which_the_answer_was_lost_is_taken_for_ours(scene):
    scene.pods._create(PODS.manifest(0, 0))
    scene.pods.failures["create"] = [ApiError(0, "the connection broke")]
    scene.want(1)
    await scene.waits()
    await scene.called("read", name(0))
    await scene.waits()
    scene.show(0)
    await scene.changed(0, PlaceState.READY)


@on(pods_scene)
async def test_a_pod_of_an_older_job_of_the_name_is_waited_for(scene):
    scene.objects.put(name(0), {**pod(0), "metadata": {**pod(0)["metadata"], "ownerReferences": []}})
    scene.want(1)
    assert "there still is a pod digits-worker-0 of another job" in await scene.waits()
    scene.objects.put(name(0), pod(0), "DELETED")
    await scene.called("create", name(0), times=2)


@on(pods_scene)
async def test_a_worker_that_is_killed_while_it_is_asked_for_is_never_made(scene):
    scene.pods.failures["create"] = [ApiError(403, "exceeded quota")] * 1000
    scene.want(1)
    await scene.waits()
    scene.give_back(0)
    lost = await scene.lost()
    assert (lost.cause, lost.detail) == (ExitCause.KILLED, "it had no place yet")
    assert ("delete", name(0), 1) not in scene.pods.calls


@on(pods_scene)
async def test_a_pod_that_may_have_been_made_when_it_was_given_up_is_deleted_in_any_case(scene):
    scene.pods.failures["create"] = [ApiError(0, "timed out")] * 1000
    scene.want(1)
    await scene.waits()
    scene.give_back(0, at_once=False)
    await scene.lost()
    await scene.called("delete", name(0), 1)
    scene.pods._create(PODS.manifest(0, 0))  # late
    await scene.called("delete", name(0), 1, times=2)


@on(pods_scene)
async def test_a_pod_that_its_node_does_not_end_is_forced_off_the_books(scene):
    await scene.ready(1)
    scene.pods.lingering = True
    scene.give_back(0)
    await scene.called("delete", name(0), 0)
    assert (await scene.lost()).cause is ExitCause.KILLED
    scene.pods.lingering = False


@on(pods_scene)
async def test_deleting_goes_on_until_the_server_has_heard(scene):
    await scene.ready(1)
    scene.pods.failures["delete"] = [ApiError(503, "x"), ApiError(0, "y"), ApiError(429, "z")]
    scene.give_back(0, at_once=False)
    assert (await scene.lost()).cause is ExitCause.KILLED
    await scene.called("delete", name(0), None, times=4)


@pytest.mark.parametrize(("failure", "forget"), [(None, False), (ApiError(0, "connection reset"), False), (GONE, True)])
@on(pods_scene)
async def test_what_happens_between_two_watches_is_told_once(scene, failure, forget):
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


@on(pods_scene)
async def test_a_pod_that_went_while_nobody_watched_is_missed(scene):
    await scene.ready(2)
    with scene.objects.lock:
        scene.objects.interrupt(GONE)
        scene.remove(0)
        scene.objects.history = []
    assert (await scene.lost()).cause is ExitCause.DELETED
    scene.show(1, "Succeeded", terminated(0))
    await scene.lost(1)


@on(pods_scene)
async def test_an_image_that_can_not_be_pulled_ends_a_job_that_never_had_a_worker(scene):
    scene.want(1)
    await scene.made(0)
    scene.show(0, "Pending", waiting("ErrImagePull", "not found"))
    assert await scene.waits() == "the image can't be pulled: not found"
    failed = await scene.next(LauncherFailed)
    assert failed.reason == "no worker could be started within 0.05 s: the image can't be pulled: not found"


@on(partial(pods_scene, PodTimeouts(image=DEADLINE)))
async def test_an_image_that_runs_as_root_ends_a_job_at_once_with_the_remedy(scene):
    scene.want(1)
    await scene.made(0)
    said = "container has runAsNonRoot and image will run as root"
    scene.show(0, "Pending", waiting("CreateContainerConfigError", said))
    assert "Dockerfile with `USER 1000`" in await scene.waits()
    assert (await scene.next(LauncherFailed)).reason.startswith("no worker can be started: nothing may run as root")


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {"elasticdl.org/worker": "abc"}},
        {"labels": {"elasticdl.org/worker": "1", "elasticdl.org/place": "first"}},
        {"labels": {}},
        {"name": "somebody-elses"},
    ],
)
@on(partial(pods_scene, found=False))
async def test_a_pod_of_somebody_elses_making_that_the_job_owns_is_left_alone(scene, metadata):
    strange = pod(1, "Running", RUNNING)
    strange["metadata"] = {**strange["metadata"], "name": name(1), **metadata}
    scene.objects.put(strange["metadata"]["name"], strange)
    assert await scene.places.found() == ()
    scene.objects.put(strange["metadata"]["name"], strange)
    await scene.ready(1)
    assert not [call for call in scene.pods.calls if call[0] == "delete"]


@on(pods_scene)
async def test_what_a_master_before_has_left_is_found_and_then_told(scene):
    await scene.ready(2)
    await scene.places.close(keep=True)
    scene.show(0, "Failed", terminated(3))
    scene.pods._create(PODS.manifest(7, 2))
    scene.places = scene.another()
    over, runs, waits = await scene.places.found()
    assert scene.reports.empty()
    assert (over.id, over.state) == (name(0), PlaceState.LOST)
    assert runs == Place(name(1), "n0", state=PlaceState.READY, log=f"kubectl logs -n lab {name(1)}")
    assert waits == Place(name(7))
    await scene.lost(0)
    scene.show(7)
    await scene.changed(7, PlaceState.READY)
    scene.want(3)
    await scene.called("create", name(8))  # no name is used again


@on(pods_scene)
async def test_in_a_pod_that_may_never_be_heard_of_again_nobody_is_started(scene):
    await scene.ready(3)
    scene.show(0, conditions=[condition("Ready", "False")])
    scene.show(1, deleted=True)
    assert (await scene.changed(0, PlaceState.ENDING)).reason == "node n0 does not answer"
    assert (await scene.changed(1, PlaceState.ENDING)).reason == "its pod is being deleted"
    await scene.places.close(keep=True)
    scene.places = scene.another()
    states = [place.state for place in await scene.places.found()]
    assert states == [PlaceState.ENDING, PlaceState.ENDING, PlaceState.READY]
    scene.show(0)
    await scene.changed(0, PlaceState.READY)


@on(pods_scene)
async def test_a_pod_that_a_master_before_has_asked_for_and_that_comes_late_is_a_place_as_well(scene):
    await scene.ready(1)
    scene.pods._create(PODS.manifest(7, 1))
    assert (await asyncio.wait_for(scene.reports.get(), DEADLINE)).place == Place(name(7))
    scene.want(2)
    scene.show(7)
    await scene.changed(7, PlaceState.READY)
    assert [number_of(each) for each in scene.objects.objects.values()] == [0, 7]


@on(partial(pods_scene, PodTimeouts(leave=DEADLINE)))
async def test_a_job_that_ends_lets_its_agents_leave_so_that_their_logs_stay(scene):
    await scene.ready(1)
    closing = asyncio.ensure_future(scene.places.close())
    await asyncio.sleep(0)
    scene.show(0, "Succeeded", terminated(0))
    await closing
    assert not [call for call in scene.pods.calls if call[0] == "delete_all"]
    assert list(scene.objects.objects) == [name(0)]


@on(pods_scene)
async def test_a_container_beside_the_worker_is_ended_with_it(scene):
    await scene.ready(1)
    known = scene.objects.objects[name(0)]
    known["spec"]["containers"] = [*known["spec"]["containers"], {"name": "sidecar"}]
    scene.show(0, "Running", terminated(0))
    assert (await scene.lost()).cause is ExitCause.CLEAN
    await scene.called("delete", name(0), 1)


@on(pods_scene)
async def test_a_container_beside_the_worker_is_ended_with_the_job(scene):
    """Else the pod keeps its GPU, and the job's time to live never begins."""
    await scene.ready(1)
    known = scene.objects.objects[name(0)]
    known["spec"]["containers"] = [*known["spec"]["containers"], {"name": "istio-proxy"}]
    scene.pods.failures["delete"] = [ApiError(503, "x")] * 3
    closing = asyncio.ensure_future(scene.places.close())
    await asyncio.sleep(0)
    scene.show(0, "Running", terminated(0))
    await closing
    assert scene.objects.objects == {}


@on(pods_scene)
async def test_a_pod_that_loses_its_labels_on_the_way_ends_the_job(scene):
    """As by an admission webhook: nobody would see what becomes of it."""
    create = scene.pods.create
    scene.pods.create = lambda manifest: create({**manifest, "metadata": {**manifest["metadata"], "labels": {}}})
    scene.want(1)
    failed = await scene.next(LauncherFailed)
    assert failed.reason.endswith(f"something in the cluster takes labels or owners from pod {name(0)}")


@on(partial(pods_scene, PodTimeouts(leave=0.01, close=0.1)))
async def test_whatever_else_fails_while_a_pod_is_looked_after_ends_the_job(scene):
    scene.pods.create = lambda manifest: {"kind": "Status"}
    scene.want(1)
    assert (await scene.next(LauncherFailed)).reason == "pods are looked after no longer: KeyError: 'metadata'"


@on(pods_scene)
async def test_whatever_fails_in_a_watch_has_it_begun_anew(scene):
    await scene.ready(1)
    scene.objects.interrupt(ValueError("no JSON"), forget=True)
    scene.show(0, "Running", RUNNING, deleted=True)
    await scene.changed(0, PlaceState.ENDING)


@on(partial(pods_scene, found=False))
async def test_a_cluster_that_never_answers_is_unreachable(scene):
    scene.objects.failures = [ApiError(0, "refused")] * 1000
    with pytest.raises(UnreachableError, match="can't list the workers' pods: refused"):
        await scene.places.found()


@on(pods_scene)
async def test_closing_waits_until_all_is_gone(scene):
    await scene.ready(2)
    scene.pods.failures["delete_all"] = [ApiError(503, "x")]
    await scene.places.close()
    for number in range(2):
        await scene.lost(number)
    scene.want(1)
    assert (scene.objects.objects, scene.reports.empty()) == ({}, True)


@on(partial(pods_scene, PodTimeouts(leave=0.01, close=0.1, first_retry=0.01, longest_retry=0.02)))
async def test_closing_is_bounded(scene):
    await scene.ready(1)
    scene.pods.failures["delete_all"] = [ApiError(503, "x")] * 1000
    await scene.places.close()
    assert scene.reports.empty()


@on(pods_scene)
async def test_the_node_of_a_pod_that_does_not_start_is_asked_why(scene):
    scene.pods.warnings[name(0)] = "no such claim"
    scene.pods.failures["warning"] = [ApiError(403, "forbidden")]
    scene.want(1)
    await scene.made(0)
    scene.show(0, "Pending", waiting("ContainerCreating"))
    uid = scene.objects.objects[name(0)]["metadata"]["uid"]
    while (reason := await scene.waits()) != "it can't be started on node n0: no such claim":
        assert reason.startswith("it is being started")
    await scene.called("warning", name(0), uid, times=2)
    scene.show(0)
    await scene.changed(0, PlaceState.READY)


@on(pods_scene)
async def test_a_pod_that_waits_for_its_name_holds_up_no_other(scene):
    scene.objects.put(name(0), {**pod(0), "metadata": {**pod(0)["metadata"], "ownerReferences": []}})
    scene.want(2)
    await scene.made(1)
    assert "of another job" in await scene.waits(0)
    scene.give_back(0)
    assert (await scene.lost(0)).cause is ExitCause.KILLED


@on(pods_scene)
async def test_who_waits_is_dropped_the_newest_first_and_who_runs_is_not(scene):
    await scene.ready(1)
    scene.want(3)
    await scene.called("create", name(2))
    for most, lost in ((2, 2), (0, 1), (0, None)):
        scene.want(most)
        if lost is not None:
            await scene.lost(lost)
    assert list(scene.objects.objects) == [name(0)]
