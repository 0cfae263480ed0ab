"""Which workers are launched and let go, who is given up, and what an exit means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from play_kit import PATIENT, Play, launched, tell

from elasticdl.master.core import events as e
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.fleet import LONGEST_DELAY, after_training, judge_loss, misuse, refusal
from elasticdl.master.core.values import CRASHES_IN_TRAINING, LIVE, WorkerState
from elasticdl.master.core.worker_record import WorkerRecord
from tests.stories import told_in

FLEETS = """
a crashed worker is replaced after a delay that doubles (1-3)
  tick; 0 crashed; wait 0.4 -> launch 0 1 2: asked for
  wait 0.2 -> launch 3
  1 crashed; wait 0.9 -> nothing
  wait 0.2 -> launch 4; worker_launched replaces = False, False, False, True, True
scaling down lets go those of least use first (1-4)
  0-3 train
  scale 1-6; 5 pend: no slot -> launch 4 5
  scale 1-2 -> change 1 for 0 1; kill 5 4: the job was scaled to at most 2; drain 3 2
  wait 1 -> nothing
  3 clean; wait 1 -> nothing; worker_left cause = drained

a worker that overstays its leave is killed and one that has finished is not (1-3, own_program)
  0 1 2 train
  1 2 drain; 2 finishes; wait 30 -> change 1 for 0 2; launch 3; launch 4
  wait 0.2 -> broken 1 for 0; kill 1: had not left 30 s after it was to
  1 killed -> worker_left cause = frozen
  3 connects; 3 drains; wait 31; 3 killed -> kill 3; worker_left cause = frozen, frozen
the users own program has time from its first word (1-2, own_program)
  tick; 0 1 placed; wait 5000; 0 connects; wait 599 -> launch 0 1; read 0 1
  wait 5 -> dump 0; kill 0: not ready 600 s after its start; launch 2
one that has not asked may be importing and one that has must beat (1-2, heartbeat_timeout=2)
  tick; 0 1 connect; 0 1 silent; wait 4 -> launch 0 1
  0 1 ask; wait 1.5 -> world 1: 0 1; read 0 1
  1 beats; wait 0.4 -> nothing
  wait 0.2 -> broken 1 for 1; kill 0: no heartbeat for 2 s
a broken connection has nothing to do with importing (1-1, heartbeat_timeout=2)
  tick; 0 connects; 0 silent; 0 cut; wait 1.8; 0 connects; wait 4 -> launch 0; read 0
  0 cut; wait 2.2 -> read 0; kill 0: no connection for 2 s; launch 1
"""


@pytest.mark.parametrize("story", told_in(FLEETS))
def test_fleets(story):
    tell(story)


def test_crashes_in_training_have_a_budget_that_training_restores():
    play = Play(1, 1, **PATIENT)
    play.do("0 trains")

    def crash_in_training(steps):
        (worker,) = play.there
        play.train_steps(worker, steps)
        (worker,) = launched(play.do(f"{worker} crashed; leap {LONGEST_DELAY}"))
        play.do(f"{worker} comes; leap 1")

    for _ in range(CRASHES_IN_TRAINING - 1):
        crash_in_training([1, 2])  # each time from the beginning
    crash_in_training(range(1, 101))
    for _ in range(CRASHES_IN_TRAINING - 2):
        crash_in_training([1])
    assert play.fact("phase") == "running"
    (worker,) = play.there
    assert "10 workers crashed in training" in play.do(f"{worker} crashed")[-1]


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
    st.lists(
        st.tuples(st.sampled_from(["killed", "connects", "drains", "scale", "wait"]), st.integers(0, 9)), max_size=25
    )
)
def test_levels_hold_whatever_happens(history):
    """Never more live workers than asked for, and after quiet time exactly as many as asked for."""
    play, maximum = Play(1, 4, **PATIENT), 4
    play.do("tick")
    for action, number in history:
        worker = play.job.fleet.next_id - 1 - number
        match action:
            case "scale":
                maximum = 1 + number
                play.do(f"scale 1-{maximum}")
            case "wait":
                play.do(f"leap {number}")
            case _ if worker >= 0:
                play.do(f"{worker} {action}")
        assert sum(record.state in LIVE for record in play.job.records.values()) <= maximum
    play.do(f"leap {LONGEST_DELAY + 1}")
    assert sum(record.state in LIVE for record in play.job.records.values()) == maximum
