"""Workers that run and have no session: who is shown, and for how long."""

import pytest
from master_kit import Run

from elasticdl.job import messages as m
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings, WorkerState
from elasticdl.master.core.worker_record import JobSnapshot, WorkerSnapshot

READ = "`elasticdl logs digits --worker 1`"


def started(own_program=False, **settings):
    """Worker 0 is ready, worker 1 runs and has not connected."""
    r = Run(minimum=2, maximum=2, own_program=own_program, job_name="digits", **settings)
    r.post(e.Tick())
    r.connect(0)
    r.post(e.FromWorker(0, m.Ask(0, 0, False)), e.WorkerPlaced(1, "10.0.0.7", 1, "node-a"))
    return r


@pytest.mark.parametrize("own_program", [False, True])
def test_who_runs_for_ten_seconds_without_a_session_is_shown_with_the_command_for_its_log(own_program):
    """It may be importing; if it does not reach its master, its log says why."""
    r = started(own_program)
    assert r.pass_time(9.9) == []
    assert r.remark(1) == ""
    assert r.pass_time(60.3) == []
    assert r.remark(1) == f"runs on node-a, no session for 70 s, see its log: {READ}"
    assert (r.reason, r.records("worker_stuck")) == ("1 of at least 2 workers ready", [])
    r.post(e.FromWorker(1, m.Hello("10.0.0.7", 1)))
    assert r.remark(1) == ""
    assert r.pass_time(100) == []


def test_it_is_given_up_in_the_end_with_where_it_stands():
    r = started(start_timeout=20.0)
    assert r.pass_time(20.2) == [i.ReadStacks(1)]
    r.post(e.StacksFound(1, "", "its process runs"))
    assert i.KillWorker(1, "not ready 20 s after its start, its process runs") in r.pass_time(2.0)


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
        assert (job.workers[0].state, job.workers[0].reason) == ("starting", "")
    for second in range(12):
        out += job.step(e.Tick(), float(second))
    assert not any(isinstance(each, i.ReadStacks) for each in out)
    assert "no session for 11 s" in job.workers[0].remark
    job.step(e.FromWorker(0, m.Hello("h", 1)), 12.0)
    for second in range(12, 60):
        job.step(e.Tick(), float(second))
    assert job.workers[0].remark == ""
