"""Workers that run and have no session: who is named, with what its log says, and for how long."""

import pytest
from test_master_job import Run

from elasticdl.common.reach import reached, unreached
from elasticdl.job.event_catalogue import standing
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.snapshot import JobSnapshot, WorkerSnapshot
from elasticdl.master.state.states import WorkerState
from elasticdl.master.state.values import Settings

ADDRESS = "digits-master.ns.svc:50001"
PROBLEM = "its name can't be resolved"
LOST = f"at {ADDRESS}: {PROBLEM}"
LOG = f"worker 1 WARNING {unreached(ADDRESS, 10, PROBLEM, 600)}\n"


def started(own_program=False, **settings):
    """Worker 0 is ready, worker 1 runs and has not connected."""
    r = Run(minimum=2, maximum=2, own_program=own_program, job_name="digits", **settings)
    r.post(e.Tick())
    r.connect(0)
    r.post(e.JoinRequested(0, 0, 0, False), e.WorkerPlaced(1, "10.0.0.7", 1, "node-a"))
    return r


def remark(r, worker_id=1):
    return r.job.view().workers[worker_id].remark


@pytest.mark.parametrize("own_program", [False, True])
def test_who_runs_for_ten_seconds_without_a_session_is_named_and_no_fault_is_claimed(own_program):
    r = started(own_program)
    assert r.pass_time(9.9) == []
    assert remark(r) == ""
    assert r.pass_time(0.3) == [i.ReadLog(1)]
    r.post(e.StacksFound(1, "importing torch\n"))
    r.pass_time(1.0)
    assert remark(r) == (
        "runs on node-a and has not reached the master for 11 s, perhaps since it still imports; its log: "
        "`elasticdl logs digits --worker 1`"
    )
    assert r.job.view().reason == "1 of at least 2 workers ready"
    assert r.records("worker_stuck") == []


def test_what_its_log_says_is_told_once_and_in_the_status_until_it_has_connected():
    r = started()
    r.pass_time(10.2)
    r.post(e.StacksFound(1, LOG))
    r.pass_time(1.0)
    log = "`elasticdl logs digits --worker 1`"
    assert remark(r) == f"runs on node-a and has not reached the master for 11 s, {LOST}; its log: {log}"
    assert r.job.view().reason == (
        f"1 of at least 2 workers ready; worker 1 runs and has not reached the master, {LOST}"
    )
    assert r.pass_time(30.0) == [i.ReadLog(1)] * 5  # more rarely as time passes
    assert r.pass_time(30.0) == [i.ReadLog(1)] * 2
    r.post(e.StacksFound(1, LOG))
    (told,) = r.records("worker_stuck")
    assert (told["worker"], told["host"], told["why"]) == (1, "node-a", "has not reached the master")
    assert standing(told) == LOST
    r.post(e.WorkerConnected(1, "10.0.0.7", 1))
    assert (remark(r), r.job.view().reason) == ("", "1 of at least 2 workers ready")
    assert r.pass_time(100) == []


def test_a_log_in_which_the_master_was_reached_explains_nothing():
    r = started()
    r.pass_time(10.2)
    r.post(e.StacksFound(1, LOG + reached(ADDRESS, 12)))
    r.pass_time(0.1)
    assert "perhaps since it still imports" in remark(r)


def test_a_log_that_can_not_be_read_is_said():
    r = started()
    r.pass_time(10.2)
    r.post(e.StacksFound(1, "", "its log can't be read: forbidden"))
    r.pass_time(0.1)
    assert "has not reached the master for 10 s, its log can't be read: forbidden;" in remark(r)


def test_many_of_them_are_told_of_in_one_line():
    r = Run(minimum=20, maximum=20)
    r.post(e.Tick(), *(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(20)))
    r.pass_time(10.2)
    r.post(*(e.StacksFound(worker_id, LOG) for worker_id in range(20)))
    reason = r.job.view().reason
    assert reason == (
        f"workers are starting; workers 0, 1, 2, 3, 4, 5, 6, 7, ... run and have not reached the master, {LOST}"
    )


def test_of_many_only_some_logs_are_read_and_others_when_those_have_connected():
    r = Run(minimum=20, maximum=20)
    r.post(e.Tick(), *(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(20)))
    assert r.pass_time(10.2) == [i.ReadLog(worker_id) for worker_id in range(8)]
    assert {each.worker_id for each in r.pass_time(10.0)} == set(range(8))
    for worker_id in range(5):
        r.connect(worker_id)
    assert {each.worker_id for each in r.pass_time(30.0) if isinstance(each, i.ReadLog)} == set(range(5, 13))


def test_different_causes_are_told_of_their_workers():
    r = Run(minimum=3, maximum=3)
    r.post(e.Tick(), *(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(3)))
    r.pass_time(10.2)
    tls = f"worker 1 WARNING {unreached(ADDRESS, 10, 'the TLS handshake fails', 600)}\n"
    r.post(e.StacksFound(0, LOG), e.StacksFound(1, tls), e.StacksFound(2, LOG))
    assert r.job.view().reason == (
        f"workers are starting; workers 0, 2 run and have not reached the master, {LOST}; "
        f"worker 1 runs and has not reached the master, at {ADDRESS}: the TLS handshake fails"
    )


def test_it_is_given_up_in_the_end_with_what_its_log_says():
    r = started(start_timeout=20.0)
    r.pass_time(20.2)
    r.post(e.StacksFound(1, LOG))
    assert i.KillWorker(1, f"not ready 20 s after its start, {LOST}") in r.pass_time(2.0)


def test_the_end_of_one_that_gives_up_by_itself_says_so_too():
    r = started()
    r.pass_time(10.2)
    r.post(e.StacksFound(1, LOG), e.WorkerExited(1, e.ExitCause.CRASHED, 1, "exit code 1"))
    (left,) = r.records("worker_left")
    assert left["reason"] == f"crashed: exit code 1; it had not reached the master, {LOST}"


def test_time_in_which_the_master_was_held_up_does_not_count():
    r = started()
    r.now += 60.0
    r.post(e.Tick())
    assert remark(r) == ""


# ---- reasons that have passed ----


def test_what_a_worker_waited_for_is_no_reason_any_more_once_it_runs():
    r = Run(minimum=1, maximum=1)
    r.post(e.Tick(), e.WorkerPending(0, "0/2 nodes are available"))
    assert r.job.view().workers[0].reason == "0/2 nodes are available"
    r.post(e.WorkerPlaced(0, "h", 1, "node-a"))
    assert (r.job.view().workers[0].state, r.job.view().workers[0].reason) == ("starting", "")


def test_nor_with_the_next_master():
    past = JobSnapshot(
        WorkerRange(minimum=1, maximum=1),
        next_id=1,
        workers=(WorkerSnapshot(0, WorkerState.PENDING, "0/2 nodes are available"),),
    )
    job = Job(Settings(past.limits), past)
    job.step(e.WorkersFound((e.FoundWorker(0, "h", 1, node="node-a"),)), 0.0)
    (worker,) = job.view().workers
    assert (worker.state, worker.reason) == ("starting", "")
    job.step(e.Tick(), 0.5)
    named = [job.step(e.Tick(), 1.0 + second) for second in range(12)]
    assert i.ReadLog(0) in [each for out in named for each in out]


def test_who_had_a_session_with_the_last_master_is_named_until_it_has_one_with_this():
    limits = WorkerRange(minimum=1, maximum=1)
    past = JobSnapshot(limits, next_id=1, workers=(WorkerSnapshot(0, WorkerState.INITIALIZING, ""),))
    job = Job(Settings(limits), past)
    job.step(e.WorkersFound((e.FoundWorker(0, "h", 1, node="node-a"),)), 0.0)
    for second in range(12):
        job.step(e.Tick(), float(second))
    assert "has not reached the master for 11 s" in job.view().workers[0].remark
    job.step(e.WorkerConnected(0, "h", 1), 12.0)
    for second in range(12, 60):
        job.step(e.Tick(), float(second))
    assert job.view().workers[0].remark == ""


def test_that_some_are_ready_is_no_reason_any_more_when_they_are_gone():
    r = started()
    assert r.job.view().reason == "1 of at least 2 workers ready"
    r.post(e.WorkerExited(0, e.ExitCause.KILLED, -9))
    assert r.job.view().reason == "workers are starting"
