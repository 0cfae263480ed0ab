"""The job as a whole: events in, instructions out."""

from master_kit import step

from elasticdl.job.event_catalogue import standing
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import Phase
from elasticdl.master.state.training import Training
from elasticdl.master.state.values import Settings

TICK = 0.1
DUMP = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line 90 in say_goodbye\n'


class Run:
    """A job with a clock, and a place for every worker that it launches."""

    def __init__(self, minimum=2, maximum=3, **settings):
        limits = WorkerRange(minimum=minimum, maximum=maximum)
        self.settings = Settings(limits, **{"progress_timeout": 10.0, **settings})
        self.job = Job(self.settings)
        self.now = 0.0
        self.out = []
        self.beats = {}  # progress by worker, for those whose heart beats
        self.waiting = set()

    def post(self, *events):
        """Returns what came of these events, without the journal."""
        before = len(self.out)
        for event in events:
            self.out += step(self.job, event, self.now)
        books = (i.Record, i.NewSteps, i.SaveState)
        return [instruction for instruction in self.out[before:] if not isinstance(instruction, books)]

    def pass_time(self, seconds, progress=True, tick=TICK):
        out = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += tick
            for worker_id in list(self.beats):
                self.beats[worker_id] += progress and worker_id not in self.waiting
                waiting = worker_id in self.waiting
                self.post(e.HeartbeatReceived(worker_id, 1, 0, self.beats[worker_id], waiting))
            out += self.post(e.Tick())
        return out

    def connect(self, *ids):
        for worker_id in ids:
            self.beats.setdefault(worker_id, 0)
            self.post(e.WorkerPlaced(worker_id, "h", 1), e.WorkerConnected(worker_id, "h", 1))

    def train(self):
        """Bring the first world up, of as many as the range allows."""
        ids = range(self.settings.workers.maximum)
        self.post(e.Tick())
        self.connect(*ids)
        self.post(*(e.JoinRequested(worker_id, 0, 0, False) for worker_id in ids))
        assert self.phase is Phase.RUNNING

    def exit(self, worker_id, cause=e.ExitCause.KILLED, code=-9):
        self.beats.pop(worker_id, None)
        return self.post(e.WorkerExited(worker_id, cause, code, "SIGKILL", "the last lines"))

    def clean_exit(self, worker_id):
        return self.exit(worker_id, e.ExitCause.CLEAN, 0)

    def finish(self, *ids):
        return self.post(*(e.WorkerFinished(worker_id, 10, 1, {"accuracy": 0.9}) for worker_id in ids))

    def records(self, name):
        return [r.fields for r in self.out if isinstance(r, i.Record) and r.event == name]

    @property
    def phase(self):
        return self.job.view().phase


def only(kind, instructions):
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def test_the_journal_tells_where_a_worker_was_started():
    r = Run(minimum=1, maximum=2)
    r.post(e.Tick(), e.WorkerPlaced(0, "h", 7, "node-a", "pod-0"), e.WorkerPlaced(1, "h", 8))
    assert r.records("worker_started") == [
        {"worker": 0, "host": "node-a", "pid": 7, "place": "pod-0"},
        {"worker": 1, "host": "h", "pid": 8},
    ]


def test_from_start_to_success():
    r = Run()
    r.train()
    assert r.finish(0, 1) == []
    assert r.phase is Phase.RUNNING
    r.finish(2)
    assert r.phase is Phase.STOPPING
    assert r.clean_exit(0) + r.clean_exit(1) == []
    assert r.clean_exit(2) == [i.EndJob(Phase.SUCCEEDED, "training is complete")]
    assert [p["phase"] for p in r.records("phase")] == ["running", "stopping", "succeeded"]
    assert r.post(e.Tick()) == []


def test_a_killed_worker_breaks_the_world_and_is_replaced():
    r = Run()
    r.train()
    reason = "worker 1 killed: SIGKILL"
    assert r.exit(1) == [i.BreakWorld((0, 2), 1, reason)]
    r.post(e.JoinRequested(0, 1, 5, True, broken=True))
    (publish,) = r.post(e.JoinRequested(2, 1, 5, True, broken=True))
    assert publish.world.worker_ids == (0, 2)
    assert r.post(e.Tick()) == [i.LaunchWorker(3, f"in place of another: {reason}")]
    assert r.records("worker_left") == [{"worker": 1, "cause": "killed", "reason": "killed: SIGKILL", "code": -9}]


def test_a_worker_that_is_not_ready_says_what_it_waits_for_and_its_deadline_holds():
    r = Run(start_timeout=20.0)
    r.post(e.Tick())
    r.connect(0, 1, 2)
    told = e.NoticeReported(1, "worker_waits", {"where": "zoo/slow.py:20 in dataset", "seconds": 5.0})
    r.post(told)
    r.pass_time(1.0)
    assert r.job.view().workers[1].remark == "has waited for 5 s at zoo/slow.py:20 in dataset"
    assert r.records("worker_waits") == [{**told.fields, "worker": 1}]
    r.post(e.JoinRequested(1, 0, 0, False))
    assert r.job.view().workers[1].remark == ""
    r.post(told)
    assert len(r.records("worker_waits")) == 1
    r.pass_time(30.0)
    assert {0, 2} <= {each.worker_id for each in only(i.KillWorker, r.out)}


def test_survivors_that_take_their_time_do_not_hold_up_a_replacement():
    r = Run()
    r.train()
    r.exit(1)
    assert only(i.LaunchWorker, r.pass_time(0.8)) == []
    assert only(i.LaunchWorker, r.pass_time(0.4))


def test_a_job_below_its_minimum_waits_and_says_why():
    r = Run(minimum=3)
    r.train()
    r.exit(1)
    r.post(*(e.JoinRequested(worker_id, 1, 5, True, broken=True) for worker_id in (0, 2)))
    assert r.phase is Phase.WAITING
    assert r.job.view().reason == "2 of at least 3 workers ready"
    r.post(e.Tick())
    r.connect(3)
    r.post(e.JoinRequested(3, 0, 0, False))
    assert r.phase is Phase.RUNNING


def test_it_is_said_when_nobody_is_left_that_held_the_state():
    r = Run(minimum=1, maximum=1)
    r.train()
    step = e.StepReport(7, 0, 0.5, 32, 0.1, 0.05, 1, 224, False)
    r.post(e.ProgressReported(0, (step,), 100, 2))
    r.exit(0)
    r.post(e.Tick())
    assert r.records("warning") == []
    r.connect(1)
    r.post(e.JoinRequested(1, 0, 0, False))
    r.pass_time(2.0)
    (warning,) = r.records("warning")
    assert "held the state after step 7" in warning["message"]


def test_a_silent_member_is_killed_and_the_others_go_on():
    r = Run()
    r.train()
    del r.beats[2]
    out = r.pass_time(10.3)
    assert only(i.KillWorker, out) == [i.KillWorker(2, "no heartbeat for 10 s")]
    assert only(i.BreakWorld, out) == [i.BreakWorld((0, 1), 1, "worker 2: no heartbeat for 10 s")]
    r.beats[2] = 5
    assert only(i.KillWorker, r.pass_time(1)) == []  # a heartbeat of a worker that was given up means nothing
    r.exit(2)
    assert r.records("worker_left")[0]["cause"] == "frozen"


def test_a_silent_standby_is_replaced_too():
    r = Run(maximum=3)
    r.post(e.Tick())
    r.connect(0)
    r.post(e.JoinRequested(0, 0, 0, False))
    del r.beats[0]
    assert only(i.KillWorker, r.pass_time(10.3)) == [i.KillWorker(0, "no heartbeat for 10 s")]


def test_a_member_whose_connection_breaks_may_come_back():
    r = Run()
    r.train()
    r.post(e.WorkerDisconnected(1))
    assert r.pass_time(1.5) == []
    assert r.post(e.WorkerConnected(1, "h", 1, world_version=1)) == []
    assert r.pass_time(5) == []


def test_a_master_that_was_held_up_blames_nobody():
    r = Run()
    r.train()
    r.pass_time(1)
    r.now += 60
    assert r.post(e.Tick()) == []
    assert r.pass_time(1) == []


def test_a_stuck_member_shows_its_stacks_and_is_killed_while_those_who_wait_for_it_are_not():
    r = Run()
    r.train()
    r.waiting = {0, 1}
    out = r.pass_time(12, progress=False)
    assert [o for o in out if not isinstance(o, i.LaunchWorker)] == [
        i.DumpStacks(2),
        i.BreakWorld((0, 1), 1, "worker 2: no progress for 10 s"),
        i.KillWorker(2, "no progress for 10 s"),
    ]


def test_a_worker_that_hangs_at_its_start_shows_its_stacks_and_is_killed():
    r = Run(minimum=1, maximum=2, start_timeout=20.0)
    r.post(e.Tick(), e.WorkerPending(1, "no slot"))
    r.connect(0)
    assert r.pass_time(19) == []
    assert r.pass_time(2.2) == [
        i.DumpStacks(0),
        i.KillWorker(0, "not ready 20 s after its start"),
        i.LaunchWorker(2, "in place of another: worker 0: not ready 20 s after its start"),
    ]
    assert r.records("warning") == [{"message": "worker 0: not ready 20 s after its start; its stacks are in its log"}]


def test_a_loop_of_workers_that_hang_at_their_start_ends_the_job_and_says_so():
    r = Run(minimum=1, maximum=1, start_timeout=20.0)
    r.post(e.Tick())
    for worker_id in range(3):
        r.post(e.WorkerPlaced(worker_id, "h", 1))
        out = r.pass_time(22)
        assert only(i.KillWorker, out) == [i.KillWorker(worker_id, "not ready 20 s after its start")]
        ended = r.exit(worker_id)
    reason = "3 workers in a row failed at the start, last worker 2: not ready 20 s after its start"
    assert ended == [i.EndJob(Phase.FAILED, reason, "the last lines")]
    assert [left["cause"] for left in r.records("worker_left")] == ["crashed", "crashed", "crashed"]
    assert r.records("warning")[0] == {"message": "worker 0: not ready 20 s after its start"}


def test_a_worker_that_gets_ready_while_it_shows_its_stacks_is_spared():
    r = Run(minimum=1, maximum=1, start_timeout=20.0)
    r.post(e.Tick())
    r.connect(0)
    assert only(i.DumpStacks, r.pass_time(20.5)) == [i.DumpStacks(0)]
    (publish,) = r.post(e.JoinRequested(0, 0, 0, False))
    assert publish.worker_ids == (0,)
    assert r.pass_time(60) == []


def test_programs_that_never_use_the_library_may_take_their_time():
    r = Run(own_program=True, start_timeout=20.0)
    r.post(e.Tick())
    r.post(*(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(3)))
    asked = [instruction for instruction in r.pass_time(100) if not isinstance(instruction, i.ReadLog)]
    assert asked == [i.ReadStacks(worker_id) for worker_id in range(3)]


def test_members_that_all_wait_for_one_another_are_sent_to_a_new_world():
    r = Run()
    r.train()
    r.waiting = {0, 1, 2}
    *asked, broken = r.pass_time(11.5)
    assert asked == [i.DumpStacks(worker_id) for worker_id in range(3)]
    assert (type(broken), broken.worker_ids) == (i.BreakWorld, (0, 1, 2))


def test_a_member_that_does_not_leave_a_broken_world_is_given_up_so_the_others_go_on():
    r = Run()
    r.train()
    r.exit(1)
    r.post(e.JoinRequested(0, 1, 5, True, broken=True))
    r.waiting = {2}
    out = r.pass_time(12)
    assert only(i.KillWorker, out) == [i.KillWorker(2, "no progress for 10 s")]
    r.connect(3, 4)
    r.post(e.JoinRequested(3, 0, 0, False), e.JoinRequested(4, 0, 0, False))
    assert r.phase is Phase.RUNNING


def test_a_long_step_is_no_crime():
    r = Run(maximum=2)
    r.train()
    r.post(e.ScaleRequested(WorkerRange(minimum=2, maximum=3)))
    r.connect(2)
    assert r.post(e.JoinRequested(2, 0, 0, False)) == [i.AnnounceChange((0, 1), 1, "worker 2 joins")]
    assert r.pass_time(60) == []


def test_scaling_down_drains_the_highest_rank_and_does_not_replace_it():
    r = Run(minimum=1)
    r.train()
    out = r.post(e.ScaleRequested(WorkerRange(minimum=1, maximum=2)))
    assert only(i.DrainWorker, out) == [i.DrainWorker(2, "the job was scaled to at most 2")]
    assert only(i.AnnounceChange, out)[0].worker_ids == (0, 1)
    r.post(e.WorkerDisconnected(2))
    r.clean_exit(2)
    out = r.post(*(e.JoinRequested(worker_id, 1, 5, True) for worker_id in (0, 1)))
    assert out[0].world.worker_ids == (0, 1)
    assert only(i.LaunchWorker, r.pass_time(5)) == []


def test_the_users_error_ends_the_job_once_with_its_traceback():
    r = Run()
    r.train()
    failed = e.WorkerFailed(1, True, "ValueError: no", "Traceback ...")
    out = r.post(failed)
    assert [stop.worker_ids for stop in only(i.StopWorkers, out)] == [(0,), (2,)]
    assert not any(stop.checkpoint for stop in only(i.StopWorkers, out))
    assert only(i.BreakWorld, out)[0].worker_ids == (0, 2)
    assert r.post(e.WorkerFailed(2, True, "another", "")) == []
    r.exit(1, e.ExitCause.CRASHED, 1)
    r.clean_exit(0)
    assert r.clean_exit(2) == [i.EndJob(Phase.FAILED, "ValueError: no", "Traceback ...")]


def test_a_worker_that_cannot_go_on_is_replaced():
    r = Run()
    r.train()
    out = r.post(e.WorkerFailed(1, False, "out of memory"))
    assert only(i.BreakWorld, out) == [i.BreakWorld((0, 2), 1, "worker 1 failed: out of memory")]
    assert r.phase is Phase.RUNNING
    assert r.exit(1, e.ExitCause.CRASHED, 1) == []
    assert only(i.LaunchWorker, r.pass_time(2))


def test_a_crash_loop_at_the_start_fails_the_job_and_shows_the_output():
    r = Run(minimum=1, maximum=1)
    r.post(e.Tick())
    for worker_id in range(3):
        out = r.exit(worker_id, e.ExitCause.CRASHED, 1)
        r.pass_time(5)
    (end,) = out
    assert end.phase is Phase.FAILED
    assert "3 workers in a row failed at the start" in end.reason
    assert end.traceback == "the last lines"


def test_a_preempted_worker_that_left_in_time_has_torn_nothing():
    r = Run()
    r.train()
    assert only(i.BreakWorld, r.post(e.WorkerDraining(2, "SIGTERM"))) == []
    assert r.exit(2, e.ExitCause.PREEMPTED, 0) == []
    (publish,) = r.post(*(e.JoinRequested(worker_id, 1, 5, True) for worker_id in (0, 1)))
    assert publish.world.worker_ids == (0, 1)
    assert r.records("worker_left")[0]["cause"] == "preempted"
    assert r.records("world_broken") == []


def test_a_launcher_that_can_never_start_anything_fails_the_job_with_its_line():
    r = Run()
    r.post(e.Tick())
    assert only(i.KillWorker, r.post(e.LauncherFailed("no such claim: data"))) != []
    assert r.post(e.LauncherFailed("no such claim: data")) == []
    r.exit(0), r.exit(1)
    assert r.exit(2) == [i.EndJob(Phase.FAILED, "no such claim: data")]


def test_stop_gives_a_grace_period_and_then_kills():
    r = Run()
    r.train()
    assert r.post(e.StopRequested("enough")) == [
        i.StopWorkers((worker_id,), "enough", checkpoint=True) for worker_id in range(3)
    ]
    r.clean_exit(0)
    assert r.records("worker_left")[0]["cause"] == "drained"
    out = r.pass_time(31)
    assert [(type(o), o.worker_id) for o in out] == [(i.KillWorker, 1), (i.KillWorker, 2)]
    r.exit(1)
    assert r.exit(2) == [i.EndJob(Phase.STOPPED, "enough")]


def test_nothing_is_said_against_a_worker_that_nobody_watches_any_more():
    r = Run()
    r.train()
    r.post(e.WorkerDraining(1, "SIGTERM"))
    del r.beats[1]
    r.pass_time(0.8 * r.settings.heartbeat_timeout)
    (leaves,) = [worker for worker in r.job.view().workers if worker.worker_id == 1]
    assert leaves.remark.startswith("no heartbeat for")
    r.post(e.StopRequested("enough"))
    assert not any(worker.remark for worker in r.job.view().workers)


def test_a_second_stop_may_be_at_once():
    r = Run()
    r.train()
    r.post(e.StopRequested("enough"))
    assert len(only(i.KillWorker, r.post(e.StopRequested("now", checkpoint=False, now=True)))) == 3


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_end():
    r = Run(minimum=1, maximum=1)
    r.train()
    r.post(e.StopRequested("enough"))
    assert r.pass_time(62) == [i.KillWorker(0, "had not left 30 s after it was to"), i.EndJob(Phase.STOPPED, "enough")]


def test_workers_that_are_still_starting_are_killed_on_stop():
    r = Run()
    r.post(e.Tick())
    out = r.post(e.StopRequested("enough"))
    assert [(type(o), o.worker_id) for o in out] == [(i.KillWorker, n) for n in range(3)]


def test_a_worker_that_connects_while_the_job_stops_is_told_to_leave():
    r = Run()
    r.post(e.Tick())
    r.post(e.StopRequested("enough"))
    assert r.post(e.WorkerConnected(0, "h", 1)) == [i.StopWorkers((0,), "enough", checkpoint=True)]


def test_programs_that_never_use_the_library_do_not_succeed():
    r = Run(own_program=True)
    r.post(e.Tick())
    r.post(*(e.WorkerPlaced(worker_id, "h", 1) for worker_id in range(2)), e.WorkerPending(2, "no slot"))
    assert r.phase is Phase.RUNNING
    r.clean_exit(0)
    r.exit(1)
    (end,) = r.exit(2)
    assert end.phase is Phase.FAILED
    assert "took no part in the job" in end.reason


def test_a_worker_that_is_killed_once_every_step_was_made_does_not_fail_the_job():
    r = Run(own_program=True)
    r.train()
    r.finish(0, 1, 2)
    r.exit(0)
    assert "may not have been done" in r.records("warning")[0]["message"]
    r.clean_exit(1)
    assert r.clean_exit(2) == [i.EndJob(Phase.SUCCEEDED, "training is complete")]


def test_a_rank_0_that_is_killed_before_it_could_say_that_all_have_finished_is_not_missed():
    r = Run(own_program=True)
    r.train()
    r.post(*(e.WorkerFinished(worker_id, 9, 1, {}, together=True) for worker_id in (1, 2)))
    assert r.exit(0) == []
    r.clean_exit(1)
    assert r.clean_exit(2) == [i.EndJob(Phase.SUCCEEDED, "training is complete")]


def test_the_only_worker_waits_for_its_replacement_unless_there_is_no_place_for_one():
    r = Run(minimum=1, maximum=1)
    r.train()
    assert only(i.DrainWorker, r.post(e.WorkerDraining(0, "SIGTERM", lingers=True))) == []
    assert only(i.DrainWorker, r.pass_time(5)) == []
    (told,) = only(i.DrainWorker, r.post(e.WorkerPending(1, "every GPU is taken (1)")))
    assert told.worker_id == 0


def test_a_job_none_of_whose_workers_has_a_place_says_what_they_wait_for_until_one_starts():
    r = Run()
    r.post(e.Tick())
    assert r.job.view().reason == "workers are starting"
    r.post(*(e.WorkerPending(worker_id, "every GPU is taken (2)") for worker_id in range(3)))
    assert (r.phase, r.job.view().reason) == (Phase.PENDING, "every GPU is taken (2)")
    r.post(e.WorkerPlaced(1, "h", 1))
    assert r.job.view().reason == "workers are starting"


def test_a_worker_that_waits_for_its_replacement_is_stopped_with_the_job():
    r = Run(minimum=1, maximum=1)
    r.train()
    r.post(e.WorkerDraining(0, "SIGTERM", lingers=True))
    (stop,) = only(i.StopWorkers, r.post(e.StopRequested("enough")))
    assert stop.worker_ids == (0,)


def test_one_of_two_that_offers_to_wait_for_its_replacement_is_told_to_go():
    r = Run(minimum=1, maximum=2)
    r.train()
    assert [told.worker_id for told in only(i.DrainWorker, r.post(e.WorkerDraining(0, "SIGTERM", lingers=True)))] == [0]


def test_one_that_is_told_to_leave_after_its_last_step_has_finished_all_the_same():
    r = Run(minimum=1, maximum=1)
    r.train()
    assert only(i.LaunchWorker, r.post(e.WorkerDraining(0, "SIGTERM")))  # its replacement
    r.finish(0)
    r.exit(1)
    assert r.clean_exit(0) == [i.EndJob(Phase.SUCCEEDED, "training is complete")]


def test_of_the_users_own_program_it_is_told_that_it_does_not_connect_or_end_and_it_is_let_be():
    r = Run(minimum=2, maximum=3, own_program=True, start_timeout=20.0)
    r.post(e.Tick())
    r.connect(0, 1)
    r.post(e.WorkerPlaced(2, "h", 1), *(e.JoinRequested(worker_id, 0, 0, False) for worker_id in (0, 1)))
    assert i.ReadStacks(2) in r.pass_time(21)
    r.post(e.StacksFound(2, "", "its process runs"))
    r.pass_time(0.1)
    assert r.job.view().workers[2].remark == "not connected for 21 s, its process runs"
    r.post(e.WorkerFinished(0, 10, 1, {}), e.WorkerFinished(1, 10, 1, {}), e.WorkerDisconnected(1))
    r.exit(2)
    r.clean_exit(0)
    assert i.ReadStacks(1) in r.pass_time(21)
    r.post(e.StacksFound(1, DUMP))
    assert [(told["worker"], told["why"], standing(told)) for told in r.records("worker_stuck")] == [
        (2, "not connected", "its process runs"),
        (1, "runs on after its training", "at /job/train.py:90 in say_goodbye"),
    ]
    assert only(i.KillWorker, r.pass_time(1000)) == []


def test_the_users_own_program_is_waited_for_after_its_training():
    r = Run(own_program=True)
    r.train()
    r.finish(0, 1, 2)
    assert r.pass_time(100) == []
    assert r.clean_exit(0) + r.clean_exit(1) == []
    assert r.clean_exit(2) == [i.EndJob(Phase.SUCCEEDED, "training is complete")]


def test_a_worker_that_finished_is_not_missed_when_its_session_ends():
    r = Run()
    r.train()
    r.finish(0)
    r.post(e.WorkerDisconnected(0))
    del r.beats[0]
    assert r.pass_time(10) == []


def test_one_that_finished_before_rank_0_was_lost_is_replaced_too_however_long_it_takes_to_end():
    r = Run(minimum=2, maximum=2, own_program=True)
    r.train()
    r.finish(1)
    r.post(e.WorkerDisconnected(1))
    launched = only(i.LaunchWorker, r.exit(0) + r.pass_time(3))
    assert len(launched) == 2
    r.clean_exit(1)
    assert [left["cause"] for left in r.records("worker_left")] == ["killed", "drained"]
    r.connect(2, 3)
    r.post(*(e.JoinRequested(worker_id, 0, 0, False) for worker_id in (2, 3)))
    assert r.phase is Phase.RUNNING


def test_standbys_are_sent_home_when_training_is_complete():
    r = Run(minimum=1, maximum=2)
    r.train()
    r.post(e.ScaleRequested(WorkerRange(minimum=1, maximum=3)))
    r.connect(2)
    r.finish(0)
    r.post(e.JoinRequested(2, 0, 0, False))
    assert r.finish(1) == [i.StopWorkers((2,), "training is complete", checkpoint=False)]


def test_a_worker_that_drains_may_take_its_time_to_end_after_its_session():
    r = Run()
    r.train()
    r.post(e.WorkerDraining(2, "SIGTERM"), e.WorkerDisconnected(2))
    del r.beats[2]
    r.post(*(e.JoinRequested(worker_id, 1, 5, True) for worker_id in (0, 1)))
    assert only(i.KillWorker, r.pass_time(10)) == []
    assert only(i.KillWorker, r.pass_time(25))


def test_the_view_tells_where_everybody_is():
    r = Run(minimum=1, maximum=2)
    r.train()
    r.post(e.ScaleRequested(WorkerRange(minimum=1, maximum=4)))
    r.post(e.WorkerPending(3, "every slot is taken (3)"))
    view = r.job.view()
    assert [(w.worker_id, w.state, w.rank) for w in view.workers] == [
        (0, "member", 0),
        (1, "member", 1),
        (2, "starting", -1),
        (3, "pending", -1),
    ]
    assert view.workers[3].reason == "every slot is taken (3)"


def test_the_steps_of_the_present_epoch_are_counted_from_where_they_are_seen():
    training = Training()

    def report(world, *steps):
        reports = [e.StepReport(n, epoch, 1.0, 4, 0.1, 0.1, world, 4 * n, False) for n, epoch in steps]
        training.report(e.ProgressReported(1, tuple(reports), 0, 0), 0.0)
        return training.epoch, training.epoch_steps

    assert report(1, (1, 0), (2, 0)) == (0, 2)
    assert report(1, (2, 0), (3, 0)) == (0, 3)  # the second is known
    assert report(2, (4, 1)) == (1, 1)
    training.lose_state()
    assert (training.epoch, training.epoch_steps) == (0, 0)
    assert report(3, (1, 0)) == (0, 1)
    training.notice(e.NoticeReported(1, "resumed", {"step": 40, "epoch": 5, "samples": 160}))
    assert (training.epoch, training.epoch_steps) == (5, 0)
    assert report(4, (41, 5)) == (5, 1)
