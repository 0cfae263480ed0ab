"""The fleet by itself: which processes to start and end, and what an exit means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.master.core.crashes import CRASHES_AT_START, CRASHES_IN_TRAINING, LONGEST_DELAY
from elasticdl.master.core.events import ExitCause, WorkerExited
from elasticdl.master.core.fleet import Fleet, WorkerState
from elasticdl.master.core.instructions import DrainWorker, KillWorker, LaunchWorker

START, GRACE = 600.0, 30.0


class Yard:
    def __init__(self, maximum=3, own_program=False):
        self.fleet = Fleet(START, GRACE, own_program=own_program)
        self.maximum = maximum
        self.now = 0.0
        self.order = []

    def reconcile(self, seconds=0.0):
        self.now += seconds
        out = self.fleet.reconcile(self.maximum, lambda: self.order, self.now)
        return [i for i in out if isinstance(i, LaunchWorker | DrainWorker | KillWorker)]

    def start(self):
        """Launch all there should be, connect them, and put them into a world."""
        ids = [i.worker_id for i in self.reconcile()]
        for worker_id in ids:
            self.fleet.placed(worker_id, "h", 100 + worker_id, self.now)
            self.fleet.connected(worker_id, "h", 100 + worker_id, self.now)
            self.fleet.ready(worker_id)
        self.fleet.reached_world(ids)
        self.order = ids
        return ids

    def exit(self, worker_id, cause=ExitCause.KILLED, code=-9, world_runs=False, step=0):
        event = WorkerExited(worker_id, cause, code, "detail")
        return self.fleet.exited(event, self.now, step=step, world_runs=world_runs)

    def crash(self, worker_id, **more):
        return self.exit(worker_id, ExitCause.CRASHED, 1, **more)


def launched(instructions):
    return [i.worker_id for i in instructions if isinstance(i, LaunchWorker)]


def test_as_many_as_the_range_allows_are_launched_once():
    y = Yard()
    assert launched(y.reconcile()) == [0, 1, 2]
    assert y.reconcile() == []


@pytest.mark.parametrize("cause", [ExitCause.KILLED, ExitCause.CLEAN])
def test_a_killed_or_drained_worker_is_replaced_at_once_under_a_new_id(cause):
    y = Yard()
    y.start()
    if cause is ExitCause.CLEAN:
        y.fleet.leaving(1, "SIGTERM", y.now)
        assert launched(y.reconcile()) == [3]  # without waiting for its end
        assert y.exit(1, cause, 0).cause is ExitCause.DRAINED
    else:
        assert y.exit(1, cause).cause is ExitCause.KILLED
        assert launched(y.reconcile()) == [3]
    assert y.reconcile() == []


def test_a_worker_that_was_given_up_counts_as_frozen_and_is_replaced():
    y = Yard()
    y.start()
    assert y.fleet.condemn(2, "no heartbeat") == [KillWorker(2, "no heartbeat")]
    assert y.fleet.condemn(2, "no heartbeat") == []
    assert launched(y.reconcile()) == [3]
    assert y.exit(2).cause is ExitCause.FROZEN


BY_THE_CLUSTER = [ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST]


@pytest.mark.parametrize("cause", [*BY_THE_CLUSTER, ExitCause.DELETED])
def test_what_the_cluster_took_away_is_replaced_at_once_however_often(cause):
    y = Yard(maximum=1)
    for worker_id in range(2 * CRASHES_IN_TRAINING):
        assert launched(y.reconcile()) == [worker_id]
        verdict = y.exit(worker_id, cause, 1)
        assert (verdict.cause, verdict.fatal) == (cause, "")
        assert verdict.reason == f"{cause.replace('_', ' ')}: detail"


@pytest.mark.parametrize("cause", BY_THE_CLUSTER)
def test_what_the_cluster_did_tells_more_than_what_came_of_it(cause):
    y = Yard(maximum=4)
    y.start()
    y.fleet.leaving(0, "SIGTERM", y.now)
    y.fleet.condemn(1, "no heartbeat for 2 s")
    y.fleet.failing(2, "can't write", y.now)
    y.fleet.finished(3)
    assert [y.exit(worker_id, cause, 0).cause for worker_id in range(4)] == [cause, cause, cause, ExitCause.FINISHED]


def test_a_deleted_worker_is_shown_as_such_unless_we_had_it_deleted():
    y = Yard()
    y.start()
    y.fleet.leaving(0, "SIGTERM", y.now)
    y.fleet.condemn(1, "no heartbeat for 2 s")
    y.fleet.condemn(2, "not ready 600 s after its start", crashed=True)
    causes = [y.exit(worker_id, ExitCause.DELETED).cause for worker_id in range(3)]
    assert causes == [ExitCause.DELETED, ExitCause.FROZEN, ExitCause.CRASHED]


def test_a_worker_out_of_memory_counts_as_one_that_crashed():
    y = Yard(maximum=1)
    y.reconcile()
    for worker_id in range(CRASHES_AT_START):
        verdict = y.exit(worker_id, ExitCause.OUT_OF_MEMORY, 137)
        assert verdict.cause is ExitCause.OUT_OF_MEMORY
        assert y.reconcile() == []
        assert launched(y.reconcile(LONGEST_DELAY)) == [worker_id + 1]
    assert verdict.fatal == "3 workers in a row failed at the start, last worker 2: out of memory: detail"


def test_a_crashed_worker_is_replaced_after_a_delay_that_doubles():
    y = Yard()
    y.start()
    y.crash(0)
    assert y.reconcile(0.4) == []
    assert launched(y.reconcile(0.2)) == [3]
    y.crash(1)
    assert y.reconcile(0.9) == []
    assert launched(y.reconcile(0.2)) == [4]


def test_a_crash_loop_at_the_start_is_fatal():
    y = Yard(maximum=1)
    fatal = []
    for _ in range(CRASHES_AT_START):
        (worker_id,) = launched(y.reconcile(LONGEST_DELAY))
        fatal.append(y.crash(worker_id).fatal)
    assert fatal[:-1] == [""] * (CRASHES_AT_START - 1)
    assert "failed at the start" in fatal[-1]
    assert "detail" in fatal[-1]


def test_only_time_with_a_place_counts_for_getting_ready():
    y = Yard(maximum=2)
    y.reconcile()
    y.fleet.pending(1, "no slot")
    y.fleet.placed(0, "h", 100, 5.0)
    y.fleet.connected(0, "h", 100, 500.0)  # does not begin anew
    assert y.fleet.unready(5.0 + START) == []
    assert y.fleet.unready(5.1 + START) == [0]
    y.fleet.ready(0)
    assert y.fleet.unready(10 * START) == []


def test_the_users_own_program_has_time_from_its_first_word():
    y = Yard(maximum=2, own_program=True)
    y.reconcile()
    for worker_id in (0, 1):
        y.fleet.placed(worker_id, "h", 100, 0.0)
    y.fleet.connected(0, "h", 100, 5000.0)
    assert y.fleet.unready(5000.0 + START) == []
    assert y.fleet.unready(50_000.0) == [0]


def test_one_told_to_leave_before_it_was_ready_has_not_crashed():
    y = Yard(maximum=1)
    y.reconcile()
    y.fleet.placed(0, "h", 100, 0.0)
    y.fleet.leaving(0, "SIGTERM", 0.0)
    assert y.fleet.unready(10 * START) == []
    y.reconcile(GRACE + 1)  # condemned
    assert y.exit(0).cause is ExitCause.FROZEN


def test_a_crash_loop_at_the_start_does_not_end_a_job_that_trains():
    y = Yard(maximum=3)
    y.start()
    y.exit(2)
    for _ in range(10):
        (worker_id,) = launched(y.reconcile(LONGEST_DELAY))
        assert y.crash(worker_id, world_runs=True).fatal == ""


def test_crashes_in_training_have_a_budget_that_training_restores():
    y = Yard(maximum=1)

    def crash_in_training(step):
        (worker_id,) = launched(y.reconcile(LONGEST_DELAY))
        y.fleet.reached_world([worker_id])
        return y.crash(worker_id, step=step).fatal

    assert not any(crash_in_training(5) for _ in range(CRASHES_IN_TRAINING - 1))
    y.fleet.trained(200)
    assert not any(crash_in_training(200) for _ in range(CRASHES_IN_TRAINING - 1))
    assert "crashed in training" in crash_in_training(200)


def test_scaling_down_lets_go_those_of_least_use_first():
    y = Yard(maximum=4)
    y.start()
    y.maximum = 6
    y.reconcile()  # 4 and 5 are starting
    y.fleet.pending(5, "no slot")
    y.maximum = 2
    y.order = [3, 1, 0, 2]
    out = y.reconcile()
    assert [(type(i), i.worker_id) for i in out] == [
        (KillWorker, 5),
        (KillWorker, 4),
        (DrainWorker, 2),
        (DrainWorker, 0),
    ]
    assert y.reconcile() == []
    assert y.exit(2, ExitCause.CLEAN, 0).cause is ExitCause.DRAINED
    assert y.reconcile() == []


def test_a_worker_that_overstays_its_leave_is_killed():
    y = Yard()
    y.start()
    y.fleet.leaving(1, "SIGTERM", y.now)
    y.reconcile()
    assert y.reconcile(GRACE) == []
    (kill,) = y.reconcile(0.1)
    assert (type(kill), kill.worker_id) == (KillWorker, 1)


@pytest.mark.parametrize("own_program", [False, True])
def test_exit_code_0_alone_is_no_success(own_program):
    y = Yard(own_program=own_program)
    y.start()
    verdict = y.exit(0, ExitCause.CLEAN, 0)
    assert (verdict.cause, verdict.fatal) == (ExitCause.CRASHED, "")
    assert "before its training was complete" in verdict.reason
    assert launched(y.reconcile(LONGEST_DELAY)) == [3]


def test_a_program_that_ends_well_and_took_no_part_fails_the_job_with_what_to_write():
    y = Yard(own_program=True)
    y.reconcile()
    y.fleet.placed(0, "h", 100, 0.0)
    assert "worker 0 ended with exit code 0 and took no part" in y.exit(0, ExitCause.CLEAN, 0).fatal


def test_one_of_several_that_took_no_part_is_replaced():
    y = Yard(own_program=True)
    y.reconcile()
    for worker_id in (0, 1):
        y.fleet.placed(worker_id, "h", 100, 0.0)
    y.fleet.connected(1, "h", 100, 0.0)
    assert y.exit(0, ExitCause.CLEAN, 0).fatal == ""


def test_a_program_that_only_calls_init_fails_the_job_with_what_to_write():
    y = Yard(own_program=True)
    y.reconcile()
    y.fleet.placed(0, "h", 100, 0.0)
    y.fleet.connected(0, "h", 100, 0.0)
    assert "after elastic.init() and has not trained" in y.exit(0, ExitCause.CLEAN, 0).fatal


def test_a_program_that_was_told_to_leave_may_end_however_little_it_did():
    y = Yard(own_program=True)
    y.reconcile()
    y.fleet.placed(0, "h", 100, 0.0)
    y.fleet.connected(0, "h", 100, 0.0)
    y.fleet.leaving(0, "SIGTERM", 0.0)
    verdict = y.exit(0, ExitCause.CLEAN, 0)
    assert (verdict.cause, verdict.fatal) == (ExitCause.DRAINED, "")


def test_the_users_own_program_may_not_fail_after_training():
    y = Yard(own_program=True)
    y.start()
    y.fleet.finished(0)
    verdict = y.crash(0)
    assert "after its training was complete" in verdict.fatal
    assert verdict.warning == ""  # it is told once


@pytest.mark.parametrize("cause", [ExitCause.KILLED, ExitCause.PREEMPTED, ExitCause.NODE_LOST, ExitCause.DELETED])
def test_one_that_is_taken_away_after_training_fails_nothing_and_is_told_of(cause):
    y = Yard(own_program=True)
    y.start()
    y.fleet.finished(0)
    verdict = y.exit(0, cause)
    assert (verdict.cause, verdict.fatal) == (ExitCause.FINISHED, "")
    assert "what its program does after training may not have been done" in verdict.warning


def test_an_exit_told_twice_counts_once():
    y = Yard()
    y.start()
    assert y.exit(0) is not None
    assert y.exit(0) is None


@given(st.lists(st.tuples(st.sampled_from(["exit", "crash", "leave", "condemn", "scale", "wait"]), st.integers(0, 9))))
def test_levels_hold_whatever_happens(history):
    """Never more live workers than asked for, never an id twice, and after quiet time exactly as many as asked for."""
    y = Yard(maximum=4)
    seen = set()

    def settle(seconds=0.0):
        new = launched(y.reconcile(seconds))
        assert not seen.intersection(new)
        seen.update(new)
        live = [w for w in y.fleet.workers.values() if w.live]
        assert len(live) <= y.maximum
        return len(live)

    settle()
    for action, number in history:
        worker_id = number if action in ("scale", "wait") else max(seen) - number
        match action:
            case "exit":
                y.exit(worker_id)
            case "crash":
                y.crash(worker_id)
            case "leave":
                y.fleet.leaving(worker_id, "", y.now)
            case "condemn":
                y.fleet.condemn(worker_id, "")
            case "scale":
                y.maximum = 1 + number
        settle(seconds=number if action == "wait" else 0.0)
    assert settle(LONGEST_DELAY + 1) == y.maximum
    assert {w.state for w in y.fleet.workers.values()} <= set(WorkerState)
