"""Workers that run and have no session: who is named, with what its log says, and for how long."""

import pytest
from master_kit import Run, only

from elasticdl.common.reach import reached, unreached
from elasticdl.job import messages as m
from elasticdl.job.event_catalogue import standing
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.snapshot import JobSnapshot, WorkerSnapshot
from elasticdl.master.state.states import WorkerState
from elasticdl.master.state.values import Settings

ADDRESS = "digits-master.ns.svc:50001"
LOST = f"at {ADDRESS}: its name can't be resolved"
READ = "`elasticdl logs digits --worker 1`"


def log(problem):
    return f"worker 1 WARNING {unreached(ADDRESS, 10, problem, 600)}\n"


LOG = log("its name can't be resolved")


def started(own_program=False, **settings):
    """Worker 0 is ready, worker 1 runs and has not connected."""
    r = Run(minimum=2, maximum=2, own_program=own_program, job_name="digits", **settings)
    r.post(e.Tick())
    r.connect(0)
    r.post(e.FromWorker(0, m.Ask(0, 0, False)), e.WorkerPlaced(1, "10.0.0.7", 1, "node-a"))
    return r


def running(count):
    """None of them has connected, and logs may be read."""
    r = Run(minimum=count, maximum=count)
    r.post(e.Tick(), *(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(count)))
    return r, only(i.ReadLog, r.pass_time(10.2))


@pytest.mark.parametrize("own_program", [False, True])
def test_who_runs_for_ten_seconds_without_a_session_is_named_and_no_fault_is_claimed(own_program):
    r = started(own_program)
    assert r.pass_time(9.9) == []
    assert r.remark(1) == ""
    assert r.pass_time(0.3) == [i.ReadLog(1)]
    r.post(e.StacksFound(1, "importing torch\n"))
    r.pass_time(1.0)
    imports = "perhaps since it still imports"
    assert r.remark(1) == f"runs on node-a and has not reached the master for 11 s, {imports}; its log: {READ}"
    assert (r.reason, r.records("worker_stuck")) == ("1 of at least 2 workers ready", [])
    r.post(e.WorkerExited(0, e.ExitCause.KILLED, -9))
    assert "ready" not in r.reason, "who was is gone"


def test_what_its_log_says_is_told_once_and_in_the_status_until_it_has_connected():
    r = started()
    r.pass_time(10.2)
    r.post(e.StacksFound(1, LOG))
    r.pass_time(1.0)
    assert r.remark(1) == f"runs on node-a and has not reached the master for 11 s, {LOST}; its log: {READ}"
    assert r.reason == f"1 of at least 2 workers ready; worker 1 runs and has not reached the master, {LOST}"
    assert r.pass_time(30.0) == [i.ReadLog(1)] * 5  # more rarely as time passes
    assert r.pass_time(30.0) == [i.ReadLog(1)] * 2
    r.post(e.StacksFound(1, LOG))
    (told,) = r.records("worker_stuck")
    assert (told["worker"], told["host"], told["why"]) == (1, "node-a", "has not reached the master")
    assert standing(told) == LOST
    r.post(e.FromWorker(1, m.Hello("10.0.0.7", 1)))
    assert (r.remark(1), r.reason) == ("", "1 of at least 2 workers ready")
    assert r.pass_time(100) == []


@pytest.mark.parametrize(
    ("found", "remark"),
    [
        (e.StacksFound(1, LOG + reached(ADDRESS, 12)), "perhaps since it still imports"),
        (e.StacksFound(1, "", "its log can't be read: forbidden"), "its log can't be read: forbidden;"),
    ],
)
def test_a_log_in_which_the_master_was_reached_explains_nothing_and_one_that_can_not_be_read_is_said(found, remark):
    r = started()
    r.pass_time(10.2)
    r.post(found)
    r.pass_time(0.1)
    assert f"has not reached the master for 10 s, {remark}" in r.remark(1)


def test_of_many_only_some_logs_are_read_and_others_when_those_have_connected_and_one_line_tells_of_them():
    r, read = running(20)
    assert read == [i.ReadLog(worker_id) for worker_id in range(8)]
    assert {each.worker_id for each in r.pass_time(10.0)} == set(range(8))
    r.post(*(e.StacksFound(worker_id, LOG) for worker_id in range(20)))
    named = "workers 0, 1, 2, 3, 4, 5, 6, 7, ... run and have not reached the master"
    assert r.reason == f"workers are starting; {named}, {LOST}"
    r.connect(*range(5))
    assert {each.worker_id for each in only(i.ReadLog, r.pass_time(30.0))} == set(range(5, 13))


def test_different_causes_are_told_of_their_workers():
    r, _ = running(3)
    tls = log("the TLS handshake fails")
    r.post(e.StacksFound(0, LOG), e.StacksFound(1, tls), e.StacksFound(2, LOG))
    assert r.reason == (
        f"workers are starting; workers 0, 2 run and have not reached the master, {LOST}; "
        f"worker 1 runs and has not reached the master, at {ADDRESS}: the TLS handshake fails"
    )


def test_it_is_given_up_in_the_end_with_what_its_log_says_and_so_it_ends_by_itself():
    r = started(start_timeout=20.0)
    r.pass_time(20.2)
    r.post(e.StacksFound(1, LOG))
    assert i.KillWorker(1, f"not ready 20 s after its start, {LOST}") in r.pass_time(2.0)
    r = started()
    r.pass_time(10.2)
    r.post(e.StacksFound(1, LOG), e.WorkerExited(1, e.ExitCause.CRASHED, 1, "exit code 1"))
    (left,) = r.records("worker_left")
    assert left["reason"] == f"crashed: exit code 1; it had not reached the master, {LOST}"


def test_time_in_which_the_master_was_held_up_does_not_count():
    r = started()
    r.now += 60.0
    r.post(e.Tick())
    assert r.remark(1) == ""


@pytest.mark.parametrize("state", [WorkerState.PENDING, WorkerState.INITIALIZING])
def test_the_next_master_names_it_too_until_it_has_a_session_and_knows_no_reason_of_before(state):
    limits = WorkerRange(minimum=1, maximum=1)
    past = JobSnapshot(limits, next_id=1, workers=(WorkerSnapshot(0, state, "0/2 nodes are available"),))
    job = Job(Settings(limits), past)
    out = job.step(e.WorkersFound((e.FoundWorker(0, "h", 1, node="node-a"),)), 0.0)
    if state is WorkerState.PENDING:
        assert (job.view().workers[0].state, job.view().workers[0].reason) == ("starting", "")
    for second in range(12):
        out += job.step(e.Tick(), float(second))
    assert i.ReadLog(0) in out
    assert "has not reached the master for 11 s" in job.view().workers[0].remark
    job.step(e.FromWorker(0, m.Hello("h", 1)), 12.0)
    for second in range(12, 60):
        job.step(e.Tick(), float(second))
    assert job.view().workers[0].remark == ""
