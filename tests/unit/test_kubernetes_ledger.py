"""What is reported of pods: each thing once, however often, late or out of order it is seen."""

import itertools

import hypothesis
from hypothesis import strategies as st
from kubernetes_kit import PODS, RUNNING, condition, pod, terminated, waiting

from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.judge import log_of
from elasticdl.places.pod_places import Ledger

RUNS = pod(phase="Running", state=RUNNING)
DONE = pod(phase="Succeeded", state=terminated(0))
FULL = pod(node="", conditions=[condition("PodScheduled", "False", "Unschedulable", "0/2 nodes")])
LEAVING = pod(phase="Running", state=RUNNING, deleted=True)


def asked(count=1):
    ledger = Ledger(PODS.name)
    assert given(ledger, count) == [(number, number) for number in range(count)]
    return ledger


def given(ledger, count):
    return [(entry.number, entry.index) for entry in ledger.ask(count)]


def waits(reason, node="", number=0):
    return [PlaceChanged(Place(PODS.name(number), node, reason=reason))]


def is_ready(number=0, state=PlaceState.READY, reason=""):
    return [PlaceChanged(Place(PODS.name(number), "n0", state=state, reason=reason, log=log_of(pod(number))))]


def losses(reports):
    return [report for report in reports if isinstance(report, PlaceLost)]


def causes(reports):
    return [report.cause for report in losses(reports)]


def test_from_asked_for_to_gone():
    ledger = asked()
    assert ledger.refused(0, "quota") == waits("quota")
    assert ledger.created(pod()) == waits("it is being started on node n0", "n0")
    assert ledger.seen(RUNS) == is_ready()
    assert ledger.seen(DONE) == [PlaceLost(PODS.name(0), ExitCause.CLEAN, 0, "exit code 0")]
    assert ledger.gone(0) == []
    assert 0 not in ledger
    assert ledger.known(0)
    quiet = asked()
    assert quiet.created(pod(node="")) == quiet.seen(pod()) == [], "a start that takes its course is no news"
    assert quiet.seen(RUNS) == is_ready()


def test_the_same_reason_is_told_once_and_so_is_any_trouble_with_the_image():
    ledger = asked()
    assert [len(ledger.seen(FULL)) for _ in range(2)] == [1, 0]
    assert len(ledger.seen(pod(state=waiting("ErrImagePull", "not found")))) == 1
    assert (ledger.image_trouble.reason, ledger.image_trouble.lasting) == (
        "the image can't be pulled: not found",
        False,
    )
    assert ledger.seen(pod(state=waiting("ImagePullBackOff", "Back-off pulling image"))) == []
    assert len(ledger.seen(pod(state=waiting("CreateContainerConfigError", "container has runAsNonRoot")))) == 1
    assert ledger.image_trouble.lasting is True


def test_the_image_is_no_trouble_once_a_worker_has_run():
    ledger = asked(2)
    ledger.seen(pod(state=waiting("ErrImagePull", "not found")))
    ledger.seen(RUNS)
    assert ledger.image_trouble is None
    ledger.seen(pod(1, state=waiting("ErrImagePull")))
    assert ledger.image_trouble is None


def test_who_took_a_pod_away_is_told_with_its_end():
    over = pod(phase="Succeeded", state=terminated(0), deleted=True)
    taken = {**over["status"], "conditions": [condition("DisruptionTarget", "True", "PreemptionByScheduler", "x")]}
    for status, cause in ((over["status"], ExitCause.DELETED), (taken, ExitCause.PREEMPTED)):
        ledger = asked()
        assert causes(ledger.seen({**over, "status": status})) == [cause]
        assert ledger.gone(0) == []


def test_what_we_had_ended_is_told_at_once_though_nobody_has_seen_it():
    """The answer to the request for it may be lost, and it may be gone before the watch has told of it."""
    ledger = asked(3)
    ledger.seen(RUNS)
    assert ledger.tell(0)
    assert causes(ledger.gone(0, LEAVING)) == [ExitCause.KILLED]
    assert not ledger.tell(0)
    assert ledger.tell(1)
    assert causes(ledger.gone(1)) == [ExitCause.KILLED]
    assert causes(ledger.gone(2)) == [ExitCause.DELETED]


def test_a_pod_that_does_not_start_waits_for_what_its_node_warns_of():
    ledger = asked(2)
    ledger.seen(pod(state=waiting("ContainerCreating")))
    assert ledger.starting() == {0: "uid-0"}
    assert ledger.warned(0, "no such claim") == waits("it can't be started on node n0: no such claim", "n0")
    assert ledger.warned(0, "no such claim") == ledger.warned(1, "it is not there yet") == []
    assert ledger.starting() == {0: "uid-0"}, "the reason may become another"
    ledger.seen(RUNS)
    assert ledger.starting() == {}
    ledger.seen(pod(1, state=waiting("ErrImagePull")))
    assert ledger.starting() == {}, "it says why by itself"


def test_a_pod_that_is_being_deleted_is_ending():
    ledger = asked()
    ledger.seen(RUNS)
    assert ledger.seen(LEAVING) == is_ready(state=PlaceState.ENDING, reason="its pod is being deleted")
    assert ledger.wanted(PlaceState.READY) == []
    assert ledger.seen(RUNS) == is_ready()  # of one whose node has come back the same is told


def test_which_node_has_refused_a_pod_is_known_before_it_is_lost():
    ledger = asked()
    refused = pod(phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed")
    place, lost = ledger.seen(refused)
    assert (place.place.node, place.place.state) == ("n0", PlaceState.WAITING)
    assert (lost.cause, lost.detail) == (ExitCause.EVICTED, "Allocate failed")


def test_indices_are_taken_again_lowest_first_and_numbers_are_not():
    ledger = asked(3)
    ledger.seen(RUNS)
    ledger.seen(DONE)
    ledger.seen(pod(1, phase="Running", state=RUNNING, deleted=True))  # its successor is asked for at once
    ledger.tell(2)
    assert given(ledger, 3) == [(3, 0), (4, 1), (5, 2)]
    assert given(ledger, 1) == [(6, 3)]
    following = Ledger(PODS.name, first_number=4)  # the next master's, of a pod that is gone without a trace
    following.adopt(pod(2))
    assert given(following, 1)[0][0] == 4
    following.adopt(pod(7))
    assert given(following, 1)[0][0] == 8


def test_pods_of_an_earlier_master_are_taken_over_where_they_are():
    ledger = Ledger(PODS.name)
    assert ledger.adopt(pod(5, phase="Running", state=RUNNING)).state is PlaceState.READY
    assert ledger.adopt(pod(7, node="")).state is PlaceState.WAITING
    assert ledger.adopt(pod(6, phase="Failed", state=terminated(1))).state is PlaceState.LOST
    assert ledger.ever_placed
    assert ledger.seen(pod(5, phase="Running", state=RUNNING)) == []
    assert given(ledger, 1) == [(8, 0)]  # those have 5 and 7
    assert ledger.missing([pod(5), pod(6)]) == [7]
    assert ledger.seen(pod(7, conditions=FULL["status"]["conditions"], node="")) == waits("0/2 nodes", number=7)
    assert causes(ledger.seen(pod(6, phase="Failed", state=terminated(1)))) == [ExitCause.CRASHED]


HISTORY = st.lists(
    st.sampled_from(
        [
            lambda ledger: ledger.seen(pod(node="")),
            lambda ledger: ledger.seen(FULL),
            lambda ledger: ledger.seen(pod(state=waiting("ErrImagePull"))),
            lambda ledger: ledger.seen(RUNS),
            lambda ledger: ledger.seen(LEAVING),
            lambda ledger: ledger.seen(DONE),
            lambda ledger: ledger.seen(pod(phase="Failed", state=terminated(137), deleted=True)),
            lambda ledger: ledger.created(pod(node="")),
            lambda ledger: ledger.warned(0, "x"),
            lambda ledger: ledger.gone(0),
            lambda ledger: ledger.gone(0, DONE),
            lambda ledger: ledger.tell(0) and [],
            lambda ledger: ledger.refused(0, "quota"),
        ]
    ),
    max_size=12,
)


@hypothesis.given(HISTORY)
def test_whatever_happens_a_place_never_waits_again_and_is_lost_once(history):
    ledger = asked()
    reports = []
    for happens in history:
        reports += happens(ledger) or []
        for state in (PlaceState.WAITING, PlaceState.READY):
            entry = ledger._entries.get(0)
            assert ledger.wanted(state) == ([0] if entry and not entry.told and entry.place.state is state else [])
    reports += ledger.gone(0)
    *changes, last = reports
    assert isinstance(last, PlaceLost)
    assert all(isinstance(report, PlaceChanged) for report in changes)
    waiting = [report.place.state is PlaceState.WAITING for report in changes]
    assert waiting == sorted(waiting, reverse=True)
    assert all(before != after for before, after in itertools.pairwise(changes))
    assert 0 not in ledger
