"""Which workers are launched and let go, who is given up, and what an exit means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from master_kit import GRACE, LONG, START, Yard, killed, launched

from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.fleet import LONGEST_DELAY, after_training, judge_loss, misuse, refusal
from elasticdl.master.core.values import CRASHES_IN_TRAINING, LIVE, WorkerState
from elasticdl.master.core.worker_record import WorkerRecord

# ---- who is launched ----


def test_a_crashed_worker_is_replaced_after_a_delay_that_doubles():
    y = Yard()
    y.wait()
    for worker_id, delay in enumerate((0.5, 1.0)):
        assert launched(y.crash(worker_id) + y.wait(0.9 * delay)) == []
        assert launched(y.wait(0.2 * delay)) == [3 + worker_id]
    assert [fields["replaces"] for fields in y.records("worker_launched")] == [False] * 3 + [True] * 2


def test_crashes_in_training_have_a_budget_that_training_restores():
    y = Yard(maximum=1)
    y.start()

    def crash_in_training(*steps):
        (worker_id,) = y.ids
        y.train(worker_id, *steps)
        y.crash(worker_id)
        y.come(*launched(y.wait(LONGEST_DELAY)))

    for _ in range(CRASHES_IN_TRAINING - 1):
        crash_in_training(1, 2)  # each time from the beginning
    crash_in_training(*range(1, 101))
    for _ in range(CRASHES_IN_TRAINING - 2):
        crash_in_training(1)
    assert y.end == ""
    crash_in_training(1)
    assert "10 workers crashed in training" in y.end


def test_scaling_down_lets_go_those_of_least_use_first():
    y = Yard(maximum=4)
    y.start()
    y.scale(1, 6)  # 4 and 5 are starting
    y.post(e.WorkerPending(5, "no slot"))
    *kills, first, second = y.scale(1, 2)
    assert [(type(o), o.worker_id) for o in kills] == [(i.KillWorker, 5), (i.KillWorker, 4)]
    assert [(told.to, type(told.message)) for told in (first, second)] == [((3,), m.Drain), ((2,), m.Drain)]
    assert y.wait(1) == []
    y.exit(3, ExitCause.CLEAN, 0)
    assert (y.causes, y.wait(1)) == (["drained"], [])


# ---- who is given up ----


def test_a_worker_that_overstays_its_leave_is_killed_and_one_that_has_finished_is_not():
    y = Yard(own_program=True)
    y.start()
    y.post(
        e.FromWorker(1, m.Draining("SIGTERM")),
        e.FromWorker(2, m.Draining("SIGTERM")),
        e.FromWorker(2, m.Finished(9, 1, {})),
    )
    assert killed(y.wait(GRACE)) == []
    assert killed(y.wait(0.2)) == [(1, "had not left 30 s after it was to")]
    y.exit(1)
    assert y.causes == ["frozen"]
    y.connect(3)
    y.post(e.FromWorker(3, m.Draining("SIGTERM")))
    y.wait(GRACE + 1)
    y.exit(3)
    assert y.causes == ["frozen"] * 2, "one that was never ready has not crashed either"


def test_the_users_own_program_has_time_from_its_first_word():
    y = Yard(maximum=2, own_program=True)
    y.wait()
    y.place(0), y.place(1)
    y.wait(5000)
    y.connect(0)
    assert killed(y.wait(START)) == []
    assert [worker_id for worker_id, _ in killed(y.wait(3) + y.wait(LONG))] == [0]


def test_one_that_has_not_asked_may_be_importing_and_one_that_has_must_beat():
    y = Yard(maximum=2, heartbeat_timeout=2.0)
    y.wait()
    for worker in (0, 1):
        y.connect(worker)
    y.wait(1)
    assert killed(y.wait(1) + y.wait(1) + y.wait(1)) == []
    for worker in (0, 1):
        y.ask(worker)

    def pass_on(*beating):
        y.post(*(e.FromWorker(worker, m.Heartbeat(1, 0, 1, waiting=False)) for worker in beating))
        return killed(y.wait(0.9))

    assert pass_on() + pass_on() + pass_on(0, 1) + pass_on(1) == []
    assert pass_on(1) == [(0, "no heartbeat for 2 s")]


def test_a_broken_connection_has_nothing_to_do_with_importing():
    y = Yard(maximum=1, heartbeat_timeout=2.0)
    y.wait()
    y.connect(0)
    y.post(e.WorkerDisconnected(0))
    y.wait(0.9), y.wait(0.9)
    y.connect(0)
    assert killed(y.wait(0.9) + y.wait(0.9) + y.wait(0.9)) == []
    y.post(e.WorkerDisconnected(0))
    assert killed(y.wait(0.9) + y.wait(0.9) + y.wait(0.9)) == [(0, "no connection for 2 s")]


# ---- what an exit means ----


def judged(state, cause, **more):
    end = judge_loss(WorkerRecord(0, "why", state, **more), e.WorkerExited(0, cause, 1, "detail"))
    return end.cause, end.reason


@pytest.mark.parametrize("cause", [ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST])
def test_what_the_cluster_did_tells_more_than_what_came_of_it(cause):
    told = (cause, f"{cause.replace('_', ' ')}: detail")
    for state in (WorkerState.MEMBER, WorkerState.DRAINING, WorkerState.KILLING):
        assert judged(state, cause) == told
    assert judged(WorkerState.FAILED, cause, failure="can't write") == told
    assert judged(WorkerState.FINISHED, cause) == (ExitCause.FINISHED, "finished")


UNTRAINED = "ended with exit code 0 before its training was complete"


@pytest.mark.parametrize(
    ("state", "cause", "more", "expected"),
    [
        (WorkerState.MEMBER, ExitCause.KILLED, {}, (ExitCause.KILLED, "killed: detail")),
        (WorkerState.MEMBER, ExitCause.CLEAN, {}, (ExitCause.CRASHED, UNTRAINED)),
        (WorkerState.DRAINING, ExitCause.DELETED, {}, (ExitCause.DELETED, "deleted: detail")),
        (WorkerState.DRAINING, ExitCause.KILLED, {}, (ExitCause.DRAINED, "why")),
        (WorkerState.KILLING, ExitCause.DELETED, {}, (ExitCause.FROZEN, "why")),
        (WorkerState.KILLING, ExitCause.DELETED, {"failure": "not ready"}, (ExitCause.CRASHED, "not ready")),
        (WorkerState.FAILED, ExitCause.CLEAN, {"failure": "no"}, (ExitCause.CRASHED, "no")),
        (WorkerState.MEMBER, ExitCause.CLEAN, {"unheard": True}, (ExitCause.DRAINED, "left while there was no master")),
    ],
)
def test_of_several_things_that_befell_a_worker_one_is_its_end(state, cause, more, expected):
    assert judged(state, cause, **more) == expected


@pytest.mark.parametrize(
    ("state", "more", "somebody_joined", "expected"),
    [
        (WorkerState.STARTING, {}, False, "worker 0 ended with exit code 0 and took no part"),
        (WorkerState.STARTING, {}, True, ""),
        (WorkerState.STARTING, {"unheard": True}, False, ""),
        (WorkerState.INITIALIZING, {}, True, "worker 0 ended with exit code 0 after elastic.init() and has not"),
        (WorkerState.INITIALIZING, {"ready": True}, True, ""),
        (WorkerState.DRAINING, {}, False, ""),
    ],
)
def test_a_program_that_ends_well_and_has_not_trained_is_told_what_to_write(state, more, somebody_joined, expected):
    record, exited = WorkerRecord(0, "", state, **more), e.WorkerExited(0, ExitCause.CLEAN, 0)
    told = misuse(record, exited, somebody_joined=somebody_joined)
    assert told.startswith(expected)
    assert bool(told) == bool(expected)


@pytest.mark.parametrize(
    ("code", "ready", "told"),
    [(2, False, "worker 0 has refused to train: exit code 2: no"), (2, True, ""), (1, False, "")],
)
def test_a_program_that_has_refused_its_arguments_is_not_started_again(code, ready, told):
    exited = e.WorkerExited(0, ExitCause.CRASHED, code, f"exit code {code}: no")
    assert refusal(WorkerRecord(0, "", WorkerState.STARTING, ready=ready), exited) == told


def test_the_users_own_program_may_not_fail_after_training_but_may_be_taken_away():
    end = after_training(e.WorkerExited(0, ExitCause.CRASHED, 3, "exit code 3"), 30)
    assert (end.reason, end.warning) == ("ended after step 30: exit code 3", "")
    assert end.fatal == "worker 0 has left its training after step 30 and ended: exit code 3"
    for cause in (ExitCause.KILLED, ExitCause.PREEMPTED, ExitCause.NODE_LOST, ExitCause.DELETED):
        end = after_training(e.WorkerExited(0, cause, -9, "detail"), 30)
        assert (end.fatal, "may not have been done" in end.warning) == ("", True)
    end = after_training(e.WorkerExited(0, ExitCause.CLEAN, 0), 30)
    assert (end.reason, end.fatal, end.warning) == ("finished", "", "")


@given(
    st.lists(st.tuples(st.sampled_from(["exit", "crash", "leave", "scale", "wait"]), st.integers(0, 9)), max_size=25)
)
def test_levels_hold_whatever_happens(history):
    """Never more live workers than asked for, never an id twice, and after quiet time exactly as many as asked for."""
    y = Yard(maximum=4)
    maximum, seen = 4, set(launched(y.wait()))

    def note(instructions):
        assert not seen.intersection(launched(instructions))
        seen.update(launched(instructions))
        live = [record for record in y.job.records.values() if record.state in LIVE]
        assert len(live) <= maximum
        return len(live)

    for action, number in history:
        worker_id = max(seen) - number
        match action:
            case "exit":
                note(y.exit(worker_id))
            case "crash":
                note(y.connect(worker_id) + y.exit(worker_id, ExitCause.KILLED, 1))
            case "leave":
                note(y.post(e.FromWorker(worker_id, m.Draining(""))))
            case "scale":
                maximum = 1 + number
                note(y.scale(1, maximum))
            case "wait":
                note(y.wait(number))
    assert note(y.wait(LONGEST_DELAY + 1)) == maximum
