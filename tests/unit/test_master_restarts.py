"""The master dies, at any point, and another follows: it has the last saved memory, what there is, and what workers say."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from master_kit import HEARTBEAT_TIMEOUT, NEVER, RECOVERY_TIMEOUT, TICK, Cluster, step

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.crashes import Crashes
from elasticdl.master.state.instructions import Member, Outcome, Phase, World
from elasticdl.master.state.snapshot import JobSnapshot, Snapshot, TrainingSnapshot, WorkerSnapshot
from elasticdl.master.state.states import WorkerState
from elasticdl.master.state.values import Settings

SOON = int(RECOVERY_TIMEOUT / TICK) - 2  # ticks within which everybody is back in time
DEATHS = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 20)), min_size=1, max_size=3)


def train(minimum=2, maximum=4, **more):
    cluster = Cluster(minimum, maximum, **more)
    cluster.live(2)
    assert cluster.job.view().phase is Phase.RUNNING
    return cluster


def members(cluster):
    return {w.worker_id for w in cluster.job.view().workers if w.state == "member"}


def of(kind, cluster):
    return [instruction for instruction in cluster.story if isinstance(instruction, kind)]


# ---- a world that nothing has happened to ----


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, SOON), min_size=4, max_size=4)), max_size=3))
def test_an_intact_world_outlives_its_masters_and_nobody_is_told_anything(absences):
    cluster = train()
    version, told = cluster.version, len(cluster.story)
    for ticks, delays in absences:
        steps = [worker.step for worker in cluster.workers.values()]
        cluster.die()
        cluster.live(ticks * TICK)
        for worker, away in zip(cluster.workers.values(), delays, strict=True):
            worker.away = away
        cluster.rise()
        cluster.live(RECOVERY_TIMEOUT + 1)
        assert all(w.step >= step + ticks for w, step in zip(cluster.workers.values(), steps, strict=True))
    cluster.live(20)
    news = [it for it in cluster.story[told:] if not isinstance(it, i.Record | i.AdoptWorld)]
    assert news == []
    assert cluster.version == version
    assert members(cluster) == set(cluster.workers) == {0, 1, 2, 3}


def test_a_master_that_remembers_nothing_learns_the_world_from_its_members():
    cluster = train()
    cluster.die()
    cluster.rise(remember=False)
    cluster.live(3)
    assert members(cluster) == {0, 1, 2, 3}
    cluster.exit(3, e.ExitCause.KILLED)
    cluster.live(5)
    assert members(cluster) == {0, 1, 2, 4}
    assert cluster.version > 1


def test_until_all_are_back_the_job_says_what_it_waits_for():
    cluster = train()
    for worker in cluster.workers.values():
        worker.away = 4
    cluster.restart()
    cluster.live(1)
    view = cluster.job.view()
    assert (view.phase, view.reason) == (
        Phase.RUNNING,
        "the master was started again, and waits for workers to come back",
    )
    cluster.live(3)
    assert (cluster.job.view().phase, cluster.job.view().reason) == (Phase.RUNNING, "")
    (record,) = [r.fields for r in of(i.Record, cluster) if r.event == "master_restarted"]
    assert {**record, "seconds": 0} == {"world": cluster.version, "members": [0, 1, 2, 3], "missing": [], "seconds": 0}
    phases = [r.fields["phase"] for r in of(i.Record, cluster) if r.event == "phase"]
    assert phases == ["running"]


# ---- what happened in the absence is noticed ----


@pytest.mark.parametrize("found", [True, False])
def test_a_member_that_died_in_the_absence_is_missed(found):
    cluster = train()
    cluster.die()
    cluster.exit(1 if found else 2, e.ExitCause.KILLED)
    cluster.rise()
    cluster.live(5)
    assert len(members(cluster)) == 4
    left = [r.fields["cause"] for r in of(i.Record, cluster) if r.event == "worker_left"]
    assert left == ["killed" if found else "deleted"]


@pytest.mark.parametrize("asked", [False, True])  # whether the others know that their world is broken, or hang in it
@pytest.mark.parametrize("remember", [False, True])
def test_a_member_that_never_comes_back_is_missed_as_in_any_world_that_does_not_train(asked, remember):
    cluster = train()
    cluster.die()
    cluster.workers[2].frozen = True
    for worker_id in (0, 1, 3) if asked else ():
        cluster.ask(cluster.workers[worker_id], broken=True)
    cluster.rise(remember)
    cluster.live(HEARTBEAT_TIMEOUT)
    assert of(i.KillWorker, cluster) == []
    cluster.live(1)
    assert of(i.KillWorker, cluster) == [i.KillWorker(2, "had not come back 5 s after the master was started again")]
    cluster.live(5)
    assert members(cluster) == {0, 1, 3, 4}


def test_a_member_that_is_away_is_waited_for_as_long_as_the_world_trains():
    cluster = train()
    cluster.workers[2].away = SOON
    cluster.restart()
    cluster.live(RECOVERY_TIMEOUT - 1)
    assert "waits for workers" in cluster.job.view().reason
    cluster.live(5)
    assert of(i.KillWorker, cluster) == []
    assert members(cluster) == {0, 1, 2, 3}


def test_a_standby_that_is_back_says_nothing_of_a_world_whose_members_are_not():
    """They may train on, where the new master's address is not known yet."""
    cluster = train(2, 4)
    cluster.post(e.ScaleRequested(WorkerRange(minimum=2, maximum=5)))
    for worker in cluster.workers.values():
        worker.away = 0 if worker.worker_id == 4 else SOON
    cluster.limits = cluster.job.view().limits
    cluster.restart()
    cluster.live(RECOVERY_TIMEOUT - 1)
    assert cluster.workers[4].asked
    cluster.live(10)
    assert of(i.KillWorker, cluster) == []
    assert members(cluster) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("doubtful", "seconds"), [((0,), HEARTBEAT_TIMEOUT), ((), RECOVERY_TIMEOUT)])
def test_nobody_is_waited_for_long_of_whom_the_cluster_says_that_they_may_not_come(doubtful, seconds):
    cluster = train(1, 1)
    cluster.die()
    cluster.workers[0].frozen = True
    cluster.rise(doubtful=doubtful)
    cluster.live(seconds - TICK)
    assert of(i.KillWorker, cluster) == []
    cluster.live(2 * TICK)
    assert [kill.worker_id for kill in of(i.KillWorker, cluster)] == [0]


def test_a_master_that_was_held_up_while_it_listened_misses_nobody_for_it():
    cluster = train()
    cluster.die()
    cluster.rise()
    cluster.post(e.Tick())
    cluster.connect(cluster.workers[0])
    cluster.now += RECOVERY_TIMEOUT - 1
    cluster.post(e.Tick())
    cluster.live(5)
    assert of(i.KillWorker, cluster) == []
    assert members(cluster) == {0, 1, 2, 3}


def test_members_whose_world_broke_in_the_absence_wait_for_the_rest():
    cluster = train()
    cluster.die()
    cluster.exit(3, e.ExitCause.KILLED)
    for worker in cluster.workers.values():
        cluster.ask(worker, broken=True)
    cluster.workers[2].away = 6
    cluster.rise()
    cluster.live(2)
    assert cluster.version == 1
    cluster.live(6)
    assert members(cluster) == {0, 1, 2, 4}


def test_a_world_that_was_remembered_but_not_announced_is_announced_as_it_was():
    cluster = train()
    cluster.exit(3, e.ExitCause.KILLED)
    for worker in list(cluster.workers.values()):
        cluster.fuse = 0 if worker.worker_id == 2 else None
        worker.orders.clear()
        cluster.ask(worker, broken=True)
    assert cluster.job is None
    assert cluster.saved.world.version == 2
    cluster.rise()
    cluster.live(1)
    assert cluster.worlds[2] == cluster.saved.world or cluster.version > 2
    assert cluster.worlds[2].worker_ids == (0, 1, 2)


def one_is_back(**times):
    """The last whom the new master waits for has a session, and has yet to ask; a newcomer waits."""
    waiting = [WorkerSnapshot(number, WorkerState.STANDBY, "", ready=True) for number in (1, 2)]
    lost = World(3, (Member(0, "h", 5, True),), "")
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=2), next_id=3, world=lost, workers=tuple(waiting))
    job = Job(Settings(memory.limits, **times), memory)
    events = (
        e.WorkersFound(tuple(e.FoundWorker(number, "h", 1) for number in (1, 2))),
        e.WorkerConnected(2, "h", 1),
        e.JoinRequested(2, 0, 0, False, False),
        e.WorkerConnected(1, "h", 1, step=5),
    )
    assert published(instruction for event in events for instruction in step(job, event, 0.0)) == []
    assert job.view().reason == "waits for a worker that was cut off: it may have the state"
    return job


def published(instructions):
    return [it.world.worker_ids for it in instructions if isinstance(it, i.PublishWorld)]


def test_one_that_is_back_is_heard_out_before_a_world_without_state_is_formed():
    """That it holds the state is in its request, which follows."""
    assert published(step(one_is_back(), e.JoinRequested(1, 2, 5, True, True), 0.1)) == [(1, 2)]


def test_one_that_is_back_and_never_asks_is_not_waited_for_without_end():
    job = one_is_back(start_timeout=5.0, heartbeat_timeout=60.0)
    assert published(step(job, e.Tick(), 5.1)) == []
    told = step(job, e.Tick(), 6.2)
    assert i.KillWorker(1, "not ready 5 s after its start") in told
    assert published(told) == [(2,)]


def test_the_version_of_a_world_that_was_left_since_the_last_save_is_not_used_again():
    """An older save knows world 1, its members have left world 2, and the master dies before there is another world."""
    inside = tuple(WorkerSnapshot(number, WorkerState.MEMBER, "", world_version=1, ready=True) for number in (0, 1))
    world = World(1, tuple(Member(number, "h", 0, False) for number in (0, 1)), "")
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=2), next_id=2, world=world, workers=inside)
    found = e.WorkersFound(tuple(e.FoundWorker(number, "h", 1) for number in (0, 1)))
    job = Job(Settings(memory.limits), memory)
    for event in (found, e.WorkerConnected(0, "h", 1), e.JoinRequested(0, 2, 9, True, True)):
        step(job, event, 0.0)
    job = Job(Settings(memory.limits), job.snapshot())
    step(job, found, 1.0)
    assert job.view().world_version == 1


def test_a_worker_that_a_master_without_memory_has_found_is_waited_for_by_the_next_one_too():
    """It may hold the state of a world that no save tells of, and the one that found it has died before it was back."""
    cluster = train(1, 2)
    cluster.workers[0].away = NEVER
    cluster.die()
    cluster.rise(remember=False)
    cluster.live(1)
    cluster.restart()
    cluster.live(1)
    assert "waits for workers" in cluster.job.view().reason


def test_where_a_worker_was_found_the_next_master_knows_though_the_one_before_had_not_saved_it():
    there = WorkerSnapshot(0, WorkerState.MEMBER, "", world_version=1)
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=1), next_id=1, workers=(there,))
    job = Job(Settings(memory.limits), memory)
    job.step(e.WorkersFound((e.FoundWorker(0, "host", 1, place="pod-0"),)), 0.0)
    job.step(e.WorkerConnected(0, "host", 1), 0.1)
    assert [worker.place for worker in job.snapshot().workers] == ["pod-0"]


def test_one_that_left_in_the_absence_counts_as_no_crash():
    cluster = train()
    for worker_id in (3, 4, 5, 6):
        cluster.die()
        cluster.leave(worker_id)
        cluster.rise()
        cluster.live(6)
        assert len(members(cluster)) == 4
    left = [r.fields for r in of(i.Record, cluster) if r.event == "worker_left"]
    assert {(r["cause"], r["reason"]) for r in left} == {("drained", "left while there was no master")}


def test_of_a_member_that_had_left_before_it_is_not_said_that_it_was_lost_in_the_absence():
    cluster = train(2, 2)
    cluster.leave(1)
    cluster.restart()
    cluster.live(6)
    assert members(cluster) == {0, 2}
    reasons = [r.fields["reason"] for r in of(i.Record, cluster) if r.event in ("world_broken", "world_formed")]
    assert reasons[1:] == ["worker 1 had left the world before"] * 2


def test_the_account_of_crashes_goes_on():
    cluster = Cluster(1, 1)
    cluster.post(e.WorkersFound(()))
    cluster.post(e.Tick())
    for worker_id in range(3):
        assert set(cluster.workers) == {worker_id}
        cluster.exit(worker_id, e.ExitCause.CRASHED)
        cluster.restart()
    assert cluster.end.reason == "3 workers in a row failed at the start, last worker 2: crashed"


def test_what_is_left_of_workers_that_were_gone_before_is_no_news():
    """Their pods are kept for their logs, and found by every master anew."""
    there = tuple(WorkerSnapshot(number, WorkerState.MEMBER, "", world_version=1) for number in (4, 5))
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=2), next_id=6, workers=there)
    job = Job(Settings(memory.limits, recovery_timeout=1.0), memory)
    over = [e.FoundWorker(number, over=True) for number in range(4)]
    told = job.step(e.WorkersFound((*over, *(e.FoundWorker(number, "host", 1) for number in (4, 5)))), 0.0)
    for number in range(4):
        told += job.step(e.WorkerExited(number, e.ExitCause.CRASHED, 1, "no good"), 0.1)
    for number in (4, 5):
        told += job.step(e.WorkerConnected(number, "host", 1), 0.2)
    told += job.step(e.Tick(), 2.0)
    assert [it.event for it in told if isinstance(it, i.Record)] == ["master_restarted"]
    assert not any(isinstance(it, i.LaunchWorker) for it in told)
    assert [worker.worker_id for worker in job.view().workers] == [4, 5]


def test_it_is_said_when_the_state_was_lost_with_the_master():
    cluster = train(1, 1)
    step = e.StepReport(7, 0, 0.5, 32, 0.1, 0.05, 1, 224, False)
    cluster.post(e.ProgressReported(0, (step,), 100, 2))
    cluster.die()
    cluster.exit(0, e.ExitCause.KILLED)
    cluster.rise()
    cluster.live(5)
    (warning,) = [r.fields["message"] for r in of(i.Record, cluster) if r.event == "warning"]
    assert "held the state after step 7" in warning


# ---- any history ----

FATES = ["kill", "vanish", "leave", "freeze", "stick", "cut", "away", "break", "repeat", "scale", "die", "rise", "wait"]
HISTORIES = st.lists(st.tuples(st.sampled_from(FATES), st.integers(0, 12)), max_size=25)


@given(HISTORIES)
@example([("kill", 0), ("kill", 0), ("freeze", 0), ("wait", 3), ("freeze", 2), ("rise", 0)])  # one that was only ready
def test_the_world_forms_again_whenever_the_master_dies(history):
    """Ids and versions, and that no intact world is broken, are watched by the cluster."""
    cluster = Cluster(minimum=2, maximum=4)
    cluster.live(2)
    for fate, number in history:
        cluster.befall(fate, number)
        cluster.post(e.Tick())
    cluster.fuse = None
    if cluster.job is None:
        cluster.rise()
    cluster.live(80)
    view = cluster.job.view()
    assert view.phase is Phase.RUNNING
    assert len(members(cluster)) == cluster.limits.maximum
    inside = {w.worker_id for w in cluster.workers.values() if w.world == cluster.version and not w.asked}
    assert members(cluster) == inside


# ---- the end ----


def survive(cluster, deaths):
    """Let the master die after so many instructions, and again; then leave it in peace."""
    for after, ticks in deaths:
        if cluster.end:
            break
        cluster.fuse = after
        cluster.live(ticks * TICK)
        if not cluster.end:
            cluster.die()
            cluster.live(ticks * TICK)
            cluster.rise()
    cluster.fuse = None
    cluster.live(60)


@given(DEATHS, st.integers(3, 20), st.booleans())
def test_training_that_was_complete_stays_complete(deaths, last_step, own_program):
    cluster = train(last_step=last_step, own_program=own_program)
    survive(cluster, deaths)
    assert cluster.end == i.EndJob(Phase.SUCCEEDED, "training is complete")
    assert cluster.launched == {0, 1, 2, 3}
    assert len(cluster.worlds) == 1


def test_who_has_finished_is_remembered_though_others_are_still_waited_for():
    cluster = train(2, 2, last_step=6)
    cluster.die()
    cluster.live(4)
    cluster.workers[1].away = 4
    cluster.rise()
    cluster.live(1)
    assert "waits for workers" in cluster.job.view().reason
    assert 0 not in cluster.workers, "its last word was taken, so it has ended"
    cluster.die()
    assert cluster.saved.finished == (0,)
    cluster.rise()
    cluster.live(10)
    assert cluster.end == i.EndJob(Phase.SUCCEEDED, "training is complete")
    assert cluster.launched == {0, 1}


@given(DEATHS, st.integers(0, 10), st.sampled_from(["stop", "fail", "launcher"]))
def test_an_end_that_was_decided_stays_decided(deaths, first, how):
    cluster = train()
    event, end = {
        "stop": (e.StopRequested("enough"), i.EndJob(Phase.STOPPED, "enough")),
        "fail": (
            e.WorkerFailed(1, True, "ValueError: no", "Traceback"),
            i.EndJob(Phase.FAILED, "ValueError: no", "Traceback"),
        ),
        "launcher": (e.LauncherFailed("no such claim"), i.EndJob(Phase.FAILED, "no such claim")),
    }[how]
    cluster.workers[1].frozen = how == "fail"
    cluster.fuse = first
    cluster.post(event)
    if cluster.job is None:
        cluster.rise()
    survive(cluster, deaths)
    assert cluster.end == end
    assert cluster.launched == {0, 1, 2, 3}
    assert len(cluster.worlds) == 1


def test_a_stop_is_not_held_up_by_those_who_have_not_come_back():
    cluster = train()
    for worker in cluster.workers.values():
        worker.away = 6
    cluster.restart()
    cluster.post(e.StopRequested("enough"))
    assert cluster.job.view().phase is Phase.STOPPING
    cluster.live(10)
    assert cluster.end == i.EndJob(Phase.STOPPED, "enough")


# ---- memory ----


def test_a_snapshot_is_the_same_after_it_was_written_and_read():
    job = JobSnapshot(
        WorkerRange(minimum=1, maximum=3),
        next_id=5,
        finished=(0, 2),
        together=True,
        world=World(3, (Member(1, "a", 7, True), Member(4, "b", 0, False)), "worker 4 joins"),
        phase=Phase.STOPPING,
        outcome=Outcome(Phase.FAILED, "no"),
        training=TrainingSnapshot(2, metrics={"accuracy": 0.5}),
        workers=(WorkerSnapshot(1, WorkerState.DRAINING, "SIGTERM", world_version=3, failure="no"),),
        crashes=Crashes(1, 2, 3),
    )
    snapshot = Snapshot(job, 12.5, 4)
    again = Snapshot.from_json(snapshot.to_json())
    assert math.isnan(again.job.training.loss)
    assert again.to_json() == snapshot.to_json()
    assert again == snapshot
    assert again.job.workers == job.workers


@pytest.mark.parametrize("text", ["", "[]", '{"job": 1}', '{"format": 2, "job": 1}', '{"format": 1}', "no"])
def test_what_is_no_snapshot_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"snapshot|Expecting value") as refused:
        Snapshot.from_json(text)
    assert "\n" not in str(refused.value)


def test_numbers_that_only_grow_make_no_difference():
    """But for the first step, after which a worker that cannot start is no reason to end the job."""
    job = Job(Settings(WorkerRange(minimum=1, maximum=1)))
    first, report = (e.StepReport(step, 0, 0.5, 32, 0.1, 0.05, 1, 32 * step, False) for step in (6, 7))
    assert i.SaveState() in job.step(e.ProgressReported(0, (first,), NEVER, 1), 0.0)
    before = job.snapshot()
    told = job.step(e.ProgressReported(0, (report,), NEVER, 1), 0.0)
    assert not any(isinstance(instruction, i.SaveState) for instruction in told)
    assert job.snapshot() == before
    assert job.snapshot().training.step == 7
    assert isinstance(job.step(e.Tick(), 1.0)[1], i.SaveState)
    assert job.snapshot() != before
