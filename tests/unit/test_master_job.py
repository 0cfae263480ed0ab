"""The job as a whole: events in, instructions out."""

import pytest
from master_kit import Run, launched, only

from elasticdl.job import messages as m
from elasticdl.job.journal import standing
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.values import CRASHES_AT_START, Phase
from elasticdl.master.core.worker_record import Training

DUMP = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line 90 in say_goodbye\n'
SUCCESS = i.EndJob(Phase.SUCCEEDED, "training is complete")


def started(**settings):
    """Its workers were asked for."""
    r = Run(**settings)
    r.post(e.Tick())
    return r


def trained(**settings):
    r = Run(**settings)
    r.train()
    return r


def test_workers_of_a_training_that_goes_on_are_counted_on():
    """So each worker of its journal has a number of its own."""
    assert launched(started(first_worker=7).out) == [7, 8, 9]


def test_the_journal_tells_where_a_worker_was_started():
    r = started(minimum=1, maximum=2)
    r.post(e.WorkerPlaced(0, "h", 7, "node-a", "pod-0"), e.WorkerPlaced(1, "h", 8))
    assert r.records("worker_started") == [
        {"worker": 0, "host": "node-a", "pid": 7, "place": "pod-0"},
        {"worker": 1, "host": "h", "pid": 8},
    ]


def test_from_start_to_success():
    r = trained()
    assert r.finish(0, 1) == []
    assert r.phase is Phase.RUNNING
    r.finish(2)
    assert r.phase is Phase.STOPPING
    assert r.clean_exit(0, 1) == []
    assert r.clean_exit(2) == [SUCCESS]
    assert [p["phase"] for p in r.records("phase")] == ["running", "stopping", "succeeded"]
    assert r.post(e.Tick()) == []


def test_a_killed_worker_breaks_the_world_and_is_replaced():
    r = trained()
    reason = "worker 1 killed: SIGKILL"
    assert r.exit(1) == [i.Tell((0, 2), m.Broken(1, reason))]
    (publish,) = r.ask_again(0, 2, broken=True)
    assert publish.message.worker_ids == (0, 2)
    assert r.post(e.Tick()) == [i.LaunchWorker(3, f"in place of another: {reason}")]
    assert r.records("worker_left") == [{"worker": 1, "cause": "killed", "reason": "killed: SIGKILL", "code": -9}]


def test_a_worker_that_is_not_ready_says_what_it_waits_for():
    r = started()
    r.connect(0, 1, 2)
    told = e.FromWorker(1, m.Notice("worker_waits", {"where": "zoo/slow.py:20 in dataset", "seconds": 5.0}))
    r.post(told)
    r.pass_time(1.0)
    assert r.remark(1) == "has waited for 5 s at zoo/slow.py:20 in dataset"
    r.ask(1)
    assert r.remark(1) == ""
    r.post(told)
    assert r.records("worker_waits") == [{**told.said.fields, "worker": 1}]


def test_survivors_that_take_their_time_do_not_hold_up_a_replacement():
    r = trained()
    r.exit(1)
    assert launched(r.pass_time(0.8)) == []
    assert launched(r.pass_time(0.4))


def test_a_job_below_its_minimum_waits_and_says_why():
    r = trained(minimum=3)
    r.exit(1)
    r.ask_again(0, 2, broken=True)
    assert (r.phase, r.reason) == (Phase.WAITING, "2 of at least 3 workers ready")
    r.post(e.Tick())
    r.connect(3)
    r.ask(3)
    assert r.phase is Phase.RUNNING


def waits_for_its_minimum(**settings):
    r = trained(minimum=2, maximum=2, job_name="digits", **settings)
    r.exit(1)
    r.ask_again(0, broken=True)
    assert r.phase is Phase.WAITING
    return r


def test_a_job_that_insists_on_its_workers_says_how_it_would_go_on_and_does_so_at_once():
    r = waits_for_its_minimum()
    assert r.reason == "1 of at least 2 workers ready; `elasticdl scale digits 1-2` goes on with fewer"
    r.scale(1, 2)
    assert (r.phase, r.reason) == (Phase.RUNNING, "")


def test_whoever_asks_a_job_that_waits_for_more_workers_does_not_make_it_wait_longer():
    r = waits_for_its_minimum()
    r.scale(3, 3)
    assert r.records("scale_requested") == [{"workers": "2-3"}]
    r.connect(2)
    r.ask(2)
    r.pass_time(1.0)
    assert r.phase is Phase.RUNNING
    r.scale(3, 3)
    assert str(r.job.limits) == "3"


def test_a_gang_is_told_of_no_other_number():
    r = waits_for_its_minimum(gang=True)
    assert r.reason == "1 of at least 2 workers ready"


def test_a_master_that_was_held_up_blames_nobody():
    r = trained()
    r.pass_time(1)
    r.now += 60
    assert r.post(e.Tick()) + r.pass_time(1) == []


def test_a_worker_that_hangs_at_its_start_shows_its_stacks_and_is_killed():
    r = started(minimum=1, maximum=2, start_timeout=20.0)
    r.post(e.WorkerPending(1, "no slot"))
    r.connect(0)
    assert r.pass_time(19) == []
    assert r.pass_time(2.2) == [
        i.Tell((0,), m.DumpStacks()),
        i.KillWorker(0, "not ready 20 s after its start"),
        i.LaunchWorker(2, "in place of another: worker 0: not ready 20 s after its start"),
    ]
    assert r.warnings == ["worker 0: not ready 20 s after its start; its stacks are in its log"]


def test_a_worker_that_gets_ready_while_it_shows_its_stacks_is_spared():
    r = started(minimum=1, maximum=1, start_timeout=20.0)
    r.connect(0)
    assert only(m.DumpStacks, r.pass_time(20.5)) == [i.Tell((0,), m.DumpStacks())]
    (publish,) = r.ask(0)
    assert publish.to == (0,)
    assert r.pass_time(60) == []


def test_a_member_that_does_not_leave_a_broken_world_is_given_up_so_the_others_go_on():
    r = trained()
    r.exit(1)
    r.ask_again(0, broken=True)
    r.waiting = {2}
    assert only(i.KillWorker, r.pass_time(12)) == [i.KillWorker(2, "no progress for 10 s")]
    r.connect(3, 4)
    r.ask(3, 4)
    assert r.phase is Phase.RUNNING


def test_the_users_error_ends_the_job_once_with_its_traceback():
    r = trained()
    out = r.post(e.FromWorker(1, m.Failed(True, "ValueError: no", "Traceback ...", trained=True)))
    assert [(stop.to, stop.message.checkpoint) for stop in only(m.StopWork, out)] == [((0,), False), ((2,), False)]
    assert only(m.Broken, out)[0].to == (0, 2)
    assert r.post(e.FromWorker(2, m.Failed(True, "another", "", trained=True))) == []
    r.exit(1, ExitCause.CRASHED, 1)
    r.clean_exit(0)
    assert r.clean_exit(2) == [i.EndJob(Phase.FAILED, "ValueError: no", "Traceback ...")]


def test_a_worker_that_cannot_go_on_is_replaced():
    r = trained()
    out = r.post(e.FromWorker(1, m.Failed(False, "out of memory", trained=True)))
    assert only(m.Broken, out) == [i.Tell((0, 2), m.Broken(1, "worker 1 failed: out of memory"))]
    assert r.phase is Phase.RUNNING
    assert r.exit(1, ExitCause.CRASHED, 1) == []
    assert launched(r.pass_time(2))


@pytest.mark.parametrize("cause", [ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY])
def test_a_crash_loop_at_the_start_fails_the_job_and_shows_the_output(cause):
    r = started(minimum=1, maximum=1)
    for worker_id in range(CRASHES_AT_START):
        assert r.phase is Phase.PENDING
        out = r.exit(worker_id, cause, 1)
        r.pass_time(5)
    reason = f"3 workers in a row failed at the start, last worker 2: {cause.replace('_', ' ')}: SIGKILL"
    assert out == [i.EndJob(Phase.FAILED, reason, "the last lines")]


def test_a_launcher_that_can_never_start_anything_fails_the_job_with_its_line():
    r = started()
    assert only(i.KillWorker, r.post(e.LauncherFailed("no such claim: data"))) != []
    assert r.post(e.LauncherFailed("no such claim: data")) == []
    r.exit(0), r.exit(1)
    assert r.exit(2) == [i.EndJob(Phase.FAILED, "no such claim: data")]


# ---- a stop ----


@pytest.mark.parametrize("second", [False, True])
def test_stop_gives_a_grace_period_unless_it_is_asked_for_again_and_then_kills(second):
    r = trained()
    assert r.post(e.StopRequested("enough")) == [
        i.Tell((worker_id,), m.StopWork("enough", checkpoint=True)) for worker_id in range(3)
    ]
    r.clean_exit(0)
    assert r.causes == ["drained"]
    assert only(i.KillWorker, r.pass_time(29)) == []
    if second:
        r.post(e.StopRequested("now", checkpoint=False, now=True))
    else:
        r.pass_time(2)
    assert [order.worker_id for order in only(i.KillWorker, r.out)] == [1, 2]
    r.exit(1)
    assert r.exit(2) == [i.EndJob(Phase.STOPPED, "enough")]


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_end():
    r = trained(minimum=1, maximum=1)
    r.post(e.StopRequested("enough"))
    assert r.pass_time(62) == [i.KillWorker(0, "had not left 30 s after it was to"), i.EndJob(Phase.STOPPED, "enough")]


def test_those_that_are_starting_are_killed_on_stop_and_who_connects_then_is_told_to_leave():
    r = started()
    out = r.post(e.StopRequested("enough"))
    assert [(type(o), o.worker_id) for o in out] == [(i.KillWorker, n) for n in range(3)]
    assert r.post(e.FromWorker(0, m.Hello("h", 1))) == [i.Tell((0,), m.StopWork("enough", checkpoint=True))]


# ---- to leave, and to finish ----


def test_the_only_worker_waits_for_its_replacement_unless_there_is_no_place_for_one():
    r = trained(minimum=1, maximum=1)
    assert only(m.Drain, r.post(e.FromWorker(0, m.Draining("SIGTERM", lingers=True))) + r.pass_time(5)) == []
    (told,) = only(m.Drain, r.post(e.WorkerPending(1, "every GPU is taken (1)")))
    assert told.to == (0,)


def test_of_pods_that_can_leave_the_state_nowhere_the_last_stays_though_no_replacement_has_a_place():
    for where, told in (
        ({}, [(0,)]),
        ({"image": "job:1"}, []),
        ({"image": "job:1", "checkpoint_dir": "s3://b"}, [(0,)]),
    ):
        r = trained(minimum=1, maximum=1, **where)
        r.post(e.FromWorker(0, m.Draining("SIGTERM", lingers=True)))
        assert [each.to for each in only(m.Drain, r.post(e.WorkerPending(1, "no node")))] == told


@pytest.mark.parametrize("maximum", [1, 2])
def test_one_that_waits_for_its_replacement_is_stopped_with_the_job_and_one_of_two_need_not_wait(maximum):
    r = trained(minimum=1, maximum=maximum)
    r.post(*(e.FromWorker(n, m.Heartbeat(1, 5, 9, False)) for n in range(maximum)))
    out = r.post(e.FromWorker(0, m.Draining("SIGTERM", lingers=True)))
    assert [told.to for told in only(m.Drain, out)] == ([(0,)] if maximum == 2 else [])
    assert (0,) in [stop.to for stop in only(m.StopWork, r.post(e.StopRequested("enough")))] or maximum == 2


def test_a_job_that_is_stopped_when_its_training_is_complete_has_succeeded():
    r = trained(minimum=1, maximum=1)
    r.post(e.StopRequested("enough"))
    r.post(e.FromWorker(0, m.Finished(9, 1, {}, together=True)))
    (end,) = only(i.EndJob, r.post(e.WorkerExited(0, e.ExitCause.CLEAN, 0)))
    assert end.phase is Phase.SUCCEEDED


def test_standbys_are_sent_home_when_training_is_complete():
    r = trained(minimum=1, maximum=2)
    r.scale(1, 3)
    r.connect(2)
    r.finish(0)
    r.ask(2)
    assert r.finish(1) == [i.Tell((2,), m.StopWork("training is complete", checkpoint=False))]


# ---- the user's own programs ----


def test_programs_that_never_use_the_library_do_not_succeed():
    r = started(own_program=True)
    r.post(*(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(2)), e.WorkerPending(2, "no slot"))
    assert r.phase is Phase.RUNNING
    r.clean_exit(0)
    r.exit(1)
    (end,) = r.exit(2)
    assert end.phase is Phase.FAILED
    assert "took no part in the job" in end.reason


def test_a_worker_that_is_killed_once_every_step_was_made_does_not_fail_the_job():
    r = trained(own_program=True)
    r.finish(0, 1, 2)
    r.exit(0)
    assert "may not have been done" in r.warnings[0]
    r.clean_exit(1)
    assert r.clean_exit(2) == [SUCCESS]


def test_one_that_finished_before_rank_0_was_lost_is_replaced_too_however_long_it_takes_to_end():
    r = trained(minimum=2, maximum=2, own_program=True)
    r.finish(1)
    r.post(e.WorkerDisconnected(1))
    assert len(launched(r.exit(0) + r.pass_time(3))) == 2
    r.clean_exit(1)
    assert r.causes == ["killed", "drained"]
    r.connect(2, 3)
    r.ask(2, 3)
    assert r.phase is Phase.RUNNING


def test_of_the_users_own_program_it_is_told_that_it_does_not_connect_or_end_and_it_is_let_be():
    r = started(own_program=True, start_timeout=20.0)
    r.connect(0, 1)
    r.post(e.WorkerPlaced(2, "h", 1))
    r.ask(0, 1)
    assert i.ReadStacks(2) in r.pass_time(21)
    r.post(e.StacksFound(2, "", "its process runs"))
    r.pass_time(0.1)
    assert r.remark(2) == "not connected for 21 s, its process runs"
    r.finish(0, 1)
    r.post(e.WorkerDisconnected(1))
    r.exit(2)
    r.clean_exit(0)
    assert i.ReadStacks(1) in r.pass_time(21)
    r.post(e.StacksFound(1, DUMP))
    assert [(told["worker"], told["why"], standing(told)) for told in r.records("worker_stuck")] == [
        (2, "not connected", "its process runs"),
        (1, "runs on after its training", "at /job/train.py:90 in say_goodbye"),
    ]
    assert only(i.KillWorker, r.pass_time(1000)) == []


# ---- what is shown ----


def test_a_job_none_of_whose_workers_has_a_place_says_what_they_wait_for_until_one_starts():
    r = started()
    assert r.reason == "workers are starting"
    r.post(*(e.WorkerPending(worker_id, "every GPU is taken (2)") for worker_id in range(3)))
    assert (r.phase, r.reason) == (Phase.PENDING, "every GPU is taken (2)")
    told = [(worker.state, worker.reason) for worker in r.job.workers]
    assert told == [("pending", "every GPU is taken (2)")] * 3
    r.post(e.WorkerPlaced(1, "h", 1))
    assert r.reason == "workers are starting"


def test_the_steps_of_the_present_epoch_are_counted_from_where_they_are_seen():
    training = Training()

    def report(world, *steps):
        reports = [m.StepReport(n, epoch, 1.0, 4, 0.1, 0.1, world, 4 * n, False) for n, epoch in steps]
        training.report(m.Progress(tuple(reports), 0, 0), 0.0)
        return training.epoch, training.epoch_steps

    assert report(1, (1, 0), (2, 0)) == (0, 2)
    assert report(1, (2, 0), (3, 0)) == (0, 3)  # the second is known
    assert report(2, (4, 1)) == (1, 1)
    training.lose_state()
    assert (training.epoch, training.epoch_steps) == (0, 0)
    assert report(3, (1, 0)) == (0, 1)
    training.notice(m.Notice("resumed", {"step": 40, "epoch": 5, "samples": 160}))
    assert (training.epoch, training.epoch_steps) == (5, 0)
    assert report(4, (41, 5)) == (5, 1)
