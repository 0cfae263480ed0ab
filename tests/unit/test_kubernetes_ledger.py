"""What is reported of pods: each thing once, however often, late or out of order it is seen."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_kit import PODS, RUNNING, condition, event, pod, terminated, waiting

from elasticdl.master.state.events import ExitCause
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.pods.judge import log_of
from elasticdl.places.pods.ledger import Ledger

RUNS = pod(phase="Running", state=RUNNING)
DONE = pod(phase="Succeeded", state=terminated(0))
FULL = pod(node="", conditions=[condition("PodScheduled", "False", "Unschedulable", "0/2 nodes")])
LEAVING = pod(phase="Running", state=RUNNING, deleted=True)


def asked(count=1):
    ledger = Ledger(PODS.name)
    for number in range(count):
        assert ledger.ask() == (number, number)
    return ledger


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


TARGET = condition("DisruptionTarget", "True", "PreemptionByScheduler", "to accommodate another")


@pytest.mark.parametrize("conditions", [[], [TARGET]])
def test_an_end_is_held_until_it_is_clear_who_did_it(conditions):
    over = pod(phase="Succeeded", state=terminated(0), deleted=True, conditions=conditions)
    ledger = asked()
    assert causes(ledger.seen(over)) == ledger.gone(0) == []  # it ends for all that is known
    assert ledger.held(0)
    related = {"kind": "Pod", "namespace": "lab", "name": "urgent"}
    (told,) = losses(ledger.happened(0, event("Preempted", "by a number", related=related)))
    assert (told.cause, told.detail) == (ExitCause.PREEMPTED, "Preempted by pod lab/urgent on node n0")
    assert ledger.settle(0) == []
    ledger = asked()
    ledger.seen(over)
    assert causes(ledger.settle(0)) == [ExitCause.PREEMPTED if conditions else ExitCause.DELETED], (
        "nothing more is heard"
    )
    assert ledger.gone(0) == ledger.settle(0) == []


def test_a_preemptor_of_which_only_the_number_is_told_is_known_if_it_was_seen_to_wait():
    uid, number = "cee3e985-bb3d-49a1-a203-43ec376c94be", "Preempted by pod {} on node n0"
    ledger = asked(2)
    ledger.finds_no_place({"kind": "Pod", "namespace": "lab", "name": "urgent", "uid": uid})
    ended = []
    for worker_id, by in ((0, uid), (1, uid.replace("c", "d"))):
        ledger.seen(pod(worker_id, phase="Succeeded", state=terminated(0), deleted=True))
        ended += ledger.happened(worker_id, event("Preempted", number.format(by), worker_id=worker_id))
    assert [each.detail for each in losses(ended)] == [
        "Preempted by pod lab/urgent on node n0",
        number.format("dee3e985-bb3d-49a1-a203-43ed376d94be"),
    ]


def test_of_those_that_wait_the_newest_are_known():
    ledger = asked()
    for number in range(1000):
        ledger.finds_no_place({"kind": "Pod", "namespace": "lab", "name": f"p{number}", "uid": f"{number:036}"})
    ledger.seen(pod(phase="Succeeded", state=terminated(0), deleted=True))
    (told,) = losses(ledger.happened(0, event("Preempted", f"Preempted by pod {999:036} on node n0")))
    assert told.detail == "Preempted by pod lab/p999 on node n0"
    assert len(ledger._waiting) <= 100


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


def test_events_of_a_pod_that_had_the_name_before_mean_nothing():
    ledger = asked()
    ledger.seen(LEAVING)
    ledger.happened(0, event("Preempted", uid="another"))
    ledger.gone(0)
    assert ledger.held(0)


def test_an_event_tells_what_a_pod_waits_for():
    ledger = asked()
    ledger.seen(pod(state=waiting("ContainerCreating")))
    told = ledger.happened(0, event("FailedMount", "no such claim", "Warning"))
    assert told == waits("it can't be started on node n0: no such claim", "n0")


def test_a_pod_that_ends_is_ending_until_it_is_clear_why():
    ledger = asked()
    ledger.seen(RUNS)
    assert ledger.seen(LEAVING) == is_ready(state=PlaceState.ENDING, reason="its pod is being deleted")
    assert ledger.wanted(PlaceState.READY) == set()
    assert ledger.seen(RUNS) == is_ready()  # of one whose node has come back the same is told
    (ending,) = ledger.seen(pod(phase="Succeeded", state=terminated(0), deleted=True))
    assert (ending.place.state, ending.place.reason) == (PlaceState.ENDING, "somebody deleted pod digits-worker-0")


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
    assert [ledger.ask() for _ in range(4)] == [(3, 0), (4, 1), (5, 2), (6, 3)]
    following = Ledger(PODS.name, first_number=4)  # the next master's, of a pod that is gone without a trace
    following.adopt(pod(2))
    assert following.ask()[0] == 4
    following.adopt(pod(7))
    assert following.ask()[0] == 8


def test_to_ask_for_one_more_costs_the_same_however_many_there_are():
    """A job of 10,000 workers asks for them one by one."""

    def calls(there):
        ledger, made = asked(there), []
        sys.setprofile(lambda frame, event, argument: made.append(frame.f_code.co_name) if event == "call" else None)
        try:
            ledger.ask()
            ledger.tell(there - 1)
        finally:
            sys.setprofile(None)
        return len(made)

    assert calls(10) == calls(500)


def test_pods_of_an_earlier_master_are_taken_over_where_they_are():
    ledger = Ledger(PODS.name)
    assert ledger.adopt(pod(5, phase="Running", state=RUNNING)).state is PlaceState.READY
    assert ledger.adopt(pod(7, node="")).state is PlaceState.WAITING
    assert ledger.adopt(pod(6, phase="Failed", state=terminated(1))).state is PlaceState.LOST
    assert ledger.ever_placed
    assert ledger.seen(pod(5, phase="Running", state=RUNNING)) == []
    assert ledger.ask() == (8, 0)  # those have 5 and 7
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
            lambda ledger: ledger.happened(0, event("Preempted")),
            lambda ledger: ledger.happened(0, event("FailedMount", "x", "Warning")),
            lambda ledger: ledger.gone(0),
            lambda ledger: ledger.gone(0, DONE),
            lambda ledger: ledger.settle(0),
            lambda ledger: ledger.tell(0) and [],
            lambda ledger: ledger.refused(0, "quota"),
        ]
    ),
    max_size=12,
)


@given(HISTORY)
def test_whatever_happens_a_place_never_waits_again_and_is_lost_once(history):
    ledger = asked()
    reports = []
    for happens in history:
        reports += happens(ledger) or []
        for state in (PlaceState.WAITING, PlaceState.READY):
            is_wanted = 0 in ledger and not ledger._entries[0].told and ledger.place(0).state is state
            assert ledger.wanted(state) == ({0} if is_wanted else set())
    reports += [*ledger.gone(0), *ledger.settle(0)]
    *changes, last = reports
    assert isinstance(last, PlaceLost)
    assert all(isinstance(report, PlaceChanged) for report in changes)
    waiting = [report.place.state is PlaceState.WAITING for report in changes]
    assert waiting == sorted(waiting, reverse=True)
    assert all(before != after for before, after in itertools.pairwise(changes))
    assert 0 not in ledger
