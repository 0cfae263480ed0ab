"""What is reported of pods: each thing once, however often, late or out of order it is seen."""

from hypothesis import given
from hypothesis import strategies as st
from kubernetes_kit import RUNNING, condition, event, pod, terminated, waiting

from elasticdl.master.state.events import ExitCause, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.pods.ledger import Ledger

RUNS = pod(phase="Running", state=RUNNING)
DONE = pod(phase="Succeeded", state=terminated(0))
FULL = pod(node="", conditions=[condition("PodScheduled", "False", "Unschedulable", "0/2 nodes")])
LEAVING = pod(phase="Running", state=RUNNING, deleted=True)


def launched(*ids):
    ledger = Ledger()
    for worker_id in ids or (0,):
        ledger.launch(worker_id)
    return ledger


def causes(reports):
    return [report.cause for report in reports if isinstance(report, WorkerExited)]


def test_from_asked_for_to_gone():
    ledger = launched()
    assert ledger.refused(0, "quota") == [WorkerPending(0, "quota")]
    assert ledger.created(pod()) == [WorkerPending(0, "it is being started on node n0", "n0")]
    assert ledger.seen(RUNS) == [WorkerPlaced(0, "10.0.0.7", 1, "n0")]
    assert ledger.seen(DONE) == [WorkerExited(0, ExitCause.CLEAN, 0, "exit code 0", node="n0")]
    assert ledger.gone(0) == []
    assert 0 not in ledger
    assert ledger.known(0)


def test_an_answer_that_was_overtaken_changes_nothing():
    ledger = launched()
    assert ledger.seen(RUNS) != []
    assert ledger.created(pod(node="")) == []
    assert ledger.seen(DONE) != []
    assert ledger.created(pod(node="")) == []


def test_a_start_that_takes_its_course_is_no_news():
    ledger = launched()
    assert ledger.created(pod(node="")) == ledger.seen(pod()) == []
    assert ledger.seen(RUNS) == [WorkerPlaced(0, "10.0.0.7", 1, "n0")]


def test_the_same_reason_is_told_once_and_so_is_any_trouble_with_the_image():
    ledger = launched()
    assert len(ledger.seen(FULL)) == 1
    assert ledger.seen(FULL) == []
    assert len(ledger.seen(pod(state=waiting("ErrImagePull", "not found")))) == 1
    assert ledger.image_trouble.reason == "the image can't be pulled: not found"
    assert ledger.seen(pod(state=waiting("ImagePullBackOff", "Back-off pulling image"))) == []
    ledger.seen(RUNS)
    assert ledger.image_trouble is None


def test_an_image_that_no_waiting_helps_is_told_of_also_after_one_that_was_late():
    ledger = launched()
    ledger.seen(pod(state=waiting("ErrImagePull", "not found")))
    assert ledger.image_trouble.lasting is False
    assert len(ledger.seen(pod(state=waiting("CreateContainerConfigError", "container has runAsNonRoot")))) == 1
    assert ledger.image_trouble.lasting is True


def test_the_image_is_no_trouble_once_a_worker_has_run():
    ledger = launched(0, 1)
    ledger.seen(RUNS)
    ledger.seen(pod(1, state=waiting("ErrImagePull")))
    assert ledger.image_trouble is None


def test_a_deletion_is_held_until_it_is_clear_who_did_it():
    ledger = launched()
    ledger.seen(LEAVING)
    assert ledger.gone(0) == []
    assert ledger.held(0)
    assert causes(ledger.happened(0, event("Preempted"))) == [ExitCause.PREEMPTED]
    assert ledger.settle(0) == []


def test_a_preemption_is_held_until_it_is_told_who_came():
    ledger = launched()
    target = condition("DisruptionTarget", "True", "PreemptionByScheduler", "to accommodate another")
    over = pod(phase="Succeeded", state=terminated(0), deleted=True, conditions=[target])
    assert ledger.seen(over) == []
    assert ledger.held(0)
    related = {"kind": "Pod", "namespace": "lab", "name": "urgent"}
    (told,) = ledger.happened(0, event("Preempted", "by a number", related=related))
    assert (told.cause, told.detail) == (ExitCause.PREEMPTED, "Preempted by pod lab/urgent on node n0")


def test_a_preemptor_of_which_only_the_number_is_told_is_known_if_it_was_seen_to_wait():
    uid, number = "cee3e985-bb3d-49a1-a203-43ec376c94be", "Preempted by pod {} on node n0"
    ledger = launched(0, 1)
    ledger.finds_no_place({"kind": "Pod", "namespace": "lab", "name": "urgent", "uid": uid})
    ended = []
    for worker_id, by in ((0, uid), (1, uid.replace("c", "d"))):
        ledger.seen(pod(worker_id, phase="Succeeded", state=terminated(0), deleted=True))
        ended += ledger.happened(worker_id, event("Preempted", number.format(by), worker_id=worker_id))
    assert [each.detail for each in ended] == [
        "Preempted by pod lab/urgent on node n0",
        number.format("dee3e985-bb3d-49a1-a203-43ed376d94be"),
    ]


def test_of_those_that_wait_the_newest_are_known():
    ledger = launched()
    for number in range(1000):
        ledger.finds_no_place({"kind": "Pod", "namespace": "lab", "name": f"p{number}", "uid": f"{number:036}"})
    ledger.seen(pod(phase="Succeeded", state=terminated(0), deleted=True))
    (told,) = ledger.happened(0, event("Preempted", f"Preempted by pod {999:036} on node n0"))
    assert told.detail == "Preempted by pod lab/p999 on node n0"
    assert len(ledger._waiting) <= 100


def test_a_deletion_of_which_nothing_more_is_heard_is_one():
    ledger = launched()
    ledger.seen(pod(phase="Succeeded", state=terminated(0), deleted=True))
    assert ledger.held(0)
    assert ledger.gone(0) == []
    assert causes(ledger.settle(0)) == [ExitCause.DELETED]
    assert ledger.gone(0) == ledger.settle(0) == []


def test_what_we_had_ended_is_told_at_once():
    ledger = launched()
    ledger.seen(RUNS)
    assert ledger.tell(0)
    assert causes(ledger.gone(0, LEAVING)) == [ExitCause.KILLED]
    assert not ledger.tell(0)


def test_events_of_a_pod_that_had_the_name_before_mean_nothing():
    ledger = launched()
    ledger.seen(LEAVING)
    ledger.happened(0, event("Preempted", uid="another"))
    ledger.gone(0)
    assert ledger.held(0)


def test_an_event_tells_what_a_pod_waits_for():
    ledger = launched()
    ledger.seen(pod(state=waiting("ContainerCreating")))
    told = ledger.happened(0, event("FailedMount", "no such claim", "Warning"))
    assert told == [WorkerPending(0, "it can't be started on node n0: no such claim", "n0")]


def test_places_are_taken_again_lowest_first():
    ledger = Ledger()
    assert [ledger.launch(worker_id) for worker_id in (0, 1, 2)] == [0, 1, 2]
    ledger.seen(RUNS)
    ledger.seen(DONE)
    ledger.seen(pod(1, phase="Succeeded", state=terminated(0)))
    assert [ledger.launch(worker_id) for worker_id in (3, 4, 5)] == [0, 1, 3]


def test_who_is_about_to_leave_is_replaced_in_its_own_place():
    ledger = launched(0, 1, 2)
    ledger.seen(LEAVING)  # preempted, say: it has its grace period, and its successor is asked for at once
    ledger.tell(1)
    assert [ledger.launch(worker_id) for worker_id in (3, 4, 5)] == [0, 1, 3]


def test_pods_of_an_earlier_master_are_taken_over_where_they_are():
    ledger = Ledger()
    ledger.adopt(pod(5, phase="Running", state=RUNNING))
    ledger.adopt(pod(7, node=""))
    assert ledger.ever_placed
    assert ledger.seen(pod(5, phase="Running", state=RUNNING)) == []
    assert ledger.launch(8) == 0  # those have 5 and 7
    assert ledger.unwanted(6)
    assert not ledger.unwanted(9)
    assert ledger.missing([pod(5)]) == [7]
    assert ledger.seen(pod(7, conditions=FULL["status"]["conditions"], node="")) == [WorkerPending(7, "0/2 nodes")]


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
def test_whatever_happens_a_worker_is_placed_once_and_ends_once(history):
    ledger = launched()
    reports = [report for happens in history for report in happens(ledger) or []]
    reports += [*ledger.gone(0), *ledger.settle(0)]
    kinds = [type(report) for report in reports]
    assert kinds.count(WorkerExited) == 1
    assert kinds[-1] is WorkerExited
    assert kinds.count(WorkerPlaced) <= 1
    if WorkerPlaced in kinds:
        assert WorkerPending not in kinds[kinds.index(WorkerPlaced) :]
    assert 0 not in ledger
