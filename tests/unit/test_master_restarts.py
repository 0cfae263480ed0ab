"""The master dies, and another follows: it has the last saved memory, what there is, and what workers say."""

import pytest
from master_kit import HEARTBEAT_TIMEOUT, NEVER, RECOVERY_TIMEOUT, TICK, Cluster, only, step

from elasticdl.job import messages as m
from elasticdl.job.messages import Member
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import events as i
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Phase, Settings, WorkerState, World
from elasticdl.master.core.worker_record import JobSnapshot, WorkerSnapshot

SOON = int(RECOVERY_TIMEOUT / TICK) - 2  # ticks within which everybody is back in time


def train(minimum=2, maximum=4, **more):
    cluster = Cluster(minimum, maximum, **more)
    cluster.live(2)
    assert cluster.phase is Phase.RUNNING
    return cluster


def members_before(*ids, next_id, state=WorkerState.MEMBER, **more):
    """What a master has left that had these."""
    there = tuple(WorkerSnapshot(number, state, "", world_version=1, ready=True) for number in ids)
    return JobSnapshot(WorkerRange(minimum=1, maximum=2), next_id=next_id, workers=there, **more)


def found(*ids):
    return e.WorkersFound(tuple(e.FoundWorker(number, "h", 1) for number in ids))


# ---- a world that nothing has happened to ----


@pytest.mark.parametrize("delays", [(0, 0, 0, 0), (SOON, 0, 1, 5), (SOON, SOON, SOON, SOON)])
def test_an_intact_world_outlives_its_masters_and_nobody_is_told_anything(delays):
    cluster = train()
    version, told = cluster.version, len(cluster.out)
    for ticks in (0, 20):
        steps = [worker.step for worker in cluster.workers.values()]
        cluster.die()
        cluster.live(ticks * TICK)
        for worker, away in zip(cluster.workers.values(), delays, strict=True):
            worker.away = away
        cluster.rise()
        cluster.live(RECOVERY_TIMEOUT + 1)
        assert all(w.step >= step + ticks for w, step in zip(cluster.workers.values(), steps, strict=True))
    cluster.live(20)
    quiet = (i.Record, i.AdoptWorld, i.SaveState, i.NewSteps)
    assert [it for it in cluster.out[told:] if not isinstance(it, quiet)] == []
    assert cluster.version == version
    assert cluster.members == set(cluster.workers) == {0, 1, 2, 3}


def test_a_master_that_remembers_nothing_has_all_form_another_world_and_no_step_is_lost():
    cluster = train()
    cluster.die()
    cluster.rise(remember=False)
    cluster.live(3)
    assert (cluster.version, cluster.members, cluster.warnings) == (2, {0, 1, 2, 3}, [])
    cluster.exit(3)
    cluster.live(5)
    assert cluster.members == {0, 1, 2, 4}
    assert cluster.version > 2


def test_a_world_that_nobody_remembers_is_broken_and_formed_anew_by_those_who_are_back():
    cluster = train()
    cluster.die()
    cluster.exit(0)
    cluster.rise(remember=False, forgotten=(0,))
    cluster.post(e.Tick())
    cluster.live(5)
    assert cluster.members == {1, 2, 3, 4}
    broken = [
        i.Tell((worker_id,), m.Broken(1, "the master does not know all of its members")) for worker_id in (1, 2, 3)
    ]
    assert cluster.all(m.Broken) == broken


def test_that_a_member_of_a_world_half_known_has_finished_is_no_end_of_the_job():
    """Whether it was rank 0, which writes the result, nobody knows."""
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=2), next_id=2)
    job = Job(Settings(memory.limits), memory)
    for event in (
        e.WorkersFound((e.FoundWorker(1, "h", 1),)),
        e.FromWorker(1, m.Hello("h", 1, world_version=5)),
        e.FromWorker(1, m.Finished(9, 1, {})),
        e.Tick(),
    ):
        step(job, event, 0.0)
    assert not job.phase.final
    assert job.reason != "training is complete"


# ---- what happened in the absence is noticed ----


@pytest.mark.parametrize(("forgotten", "cause"), [((), "killed"), ((2,), "lost")])
def test_a_member_that_died_in_the_absence_is_missed(forgotten, cause):
    cluster = train()
    cluster.die()
    cluster.exit(2)
    cluster.rise(forgotten=forgotten)
    cluster.live(5)
    assert (len(cluster.members), cluster.causes) == (4, [cause])


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
    assert (cluster.all(i.KillWorker), cluster.version) == ([], 1), "the others wait for it"
    cluster.live(1)
    assert cluster.all(i.KillWorker) == [i.KillWorker(2, "had not come back 5 s after the master was started again")]
    cluster.live(5)
    assert cluster.members == {0, 1, 3, 4}


def test_a_member_that_is_away_is_waited_for_as_long_as_the_world_trains_and_its_standbys_say_nothing():
    """Members may train on, where the new master's address is not known yet."""
    cluster = train()
    cluster.scale(2, 5)
    for worker in cluster.workers.values():
        worker.away = 0 if worker.worker_id == 4 else SOON
    cluster.restart()
    cluster.live(RECOVERY_TIMEOUT - 1)
    assert cluster.reason == "the master was started again, and waits for workers to come back"
    assert cluster.workers[4].asked
    cluster.live(10)
    assert (cluster.all(i.KillWorker), cluster.reason) == ([], "")
    assert cluster.members == {0, 1, 2, 3, 4}
    (record,) = cluster.records("master_restarted")
    assert {**record, "seconds": 0} == {"world": 1, "members": [0, 1, 2, 3], "missing": [], "seconds": 0}
    assert [fields["phase"] for fields in cluster.records("phase")] == ["running"]


def test_a_worker_is_waited_for_long_if_nobody_shows_that_the_new_masters_address_is_known():
    cluster = train(1, 1)
    cluster.die()
    cluster.workers[0].frozen = True
    cluster.rise()
    cluster.live(RECOVERY_TIMEOUT - TICK)
    assert cluster.all(i.KillWorker) == []
    cluster.live(2 * TICK)
    assert [kill.worker_id for kill in cluster.all(i.KillWorker)] == [0]


def test_a_master_that_was_held_up_while_it_listened_misses_nobody_for_it():
    cluster = train()
    cluster.restart()
    cluster.post(e.Tick())
    cluster.connect(cluster.workers[0])
    cluster.now += RECOVERY_TIMEOUT - 1
    cluster.post(e.Tick())
    cluster.live(5)
    assert cluster.all(i.KillWorker) == []
    assert cluster.members == {0, 1, 2, 3}


def one_is_back(**times):
    """The last whom the new master waits for has a session, and has yet to ask; a newcomer waits."""
    lost = World(3, (Member(0, "h", 5, True),), "")
    memory = members_before(1, 2, next_id=3, state=WorkerState.STANDBY, world=lost)
    job = Job(Settings(memory.limits, **times), memory)
    back, asks = e.FromWorker(1, m.Hello("h", 1)), e.FromWorker(2, m.Ask(0, 0, False, False))
    events = (found(1, 2), e.FromWorker(2, m.Hello("h", 1)), asks, back)
    assert published(instruction for event in events for instruction in step(job, event, 0.0)) == []
    assert job.reason == "waits for a worker that was cut off: it may have the state"
    return job


def published(instructions):
    return [told.message.worker_ids for told in only(World, instructions)]


def test_one_that_is_back_is_heard_out_before_a_world_without_state_is_formed_and_not_without_end():
    """That it holds the state is in its request, which follows."""
    assert published(step(one_is_back(), e.FromWorker(1, m.Ask(2, 5, True, True)), 0.1)) == [(1, 2)]
    job = one_is_back(start_timeout=5.0, heartbeat_timeout=60.0)
    assert published(step(job, e.Tick(), 5.1)) == []
    told = step(job, e.Tick(), 6.2)
    assert i.KillWorker(1, "not ready 5 s after its start") in told
    assert published(told) == [(2,)]


def test_the_version_of_a_world_that_was_left_since_the_last_save_is_not_used_again():
    """An older save knows world 1, its members have left world 2, and the master dies before there is another world."""
    world = World(1, tuple(Member(number, "h", 0, False) for number in (0, 1)), "")
    memory = members_before(0, 1, next_id=2, world=world)
    job = Job(Settings(memory.limits), memory)
    for event in (found(0, 1), e.FromWorker(0, m.Hello("h", 1)), e.FromWorker(0, m.Ask(2, 9, True, True))):
        step(job, event, 0.0)
    job = Job(Settings(memory.limits), job.snapshot())
    step(job, found(0, 1), 1.0)
    assert job.rendezvous.version == 1


def test_a_worker_that_a_master_without_memory_has_found_is_waited_for_by_the_next_one_too():
    """It may hold the state of a world that no save tells of, and the one that found it has died before it was back."""
    cluster = train(1, 2)
    cluster.workers[0].away = NEVER
    cluster.die()
    cluster.rise(remember=False)
    cluster.live(1)
    cluster.restart()
    cluster.live(1)
    assert "waits for workers" in cluster.reason
    cluster.workers[0].away = 0
    cluster.live(2)
    assert (cluster.version, cluster.members, cluster.warnings) == (2, {0, 1}, [])


def test_one_that_left_in_the_absence_counts_as_no_crash_and_crashes_count_on():
    cluster = train()
    for worker_id in (3, 4, 5, 6):
        cluster.die()
        cluster.leave(worker_id)
        cluster.rise()
        cluster.live(6)
        assert len(cluster.members) == 4
    left = {(fields["cause"], fields["reason"]) for fields in cluster.records("worker_left")}
    assert left == {("drained", "left while there was no master")}
    cluster = Cluster(1, 1)
    cluster.post(e.WorkersFound(()), e.Tick())
    for worker_id in range(3):
        assert set(cluster.workers) == {worker_id}
        cluster.exit(worker_id, e.ExitCause.CRASHED)
        cluster.restart()
    assert cluster.end.reason == "3 workers in a row failed at the start, last worker 2: crashed"


@pytest.mark.parametrize(
    ("place", "cause", "reason"),
    [
        ("", "drained", "drained: the master ended before it had a place"),
        ("pod-1", "lost", "lost: it was gone when the master started again, and nobody has seen why"),
    ],
)
def test_of_a_worker_that_is_not_there_it_is_said_whether_somebody_may_have_taken_it_away(place, cause, reason):
    waiting = WorkerSnapshot(0, WorkerState.STARTING, "asked for", place=place)
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=1), next_id=1, workers=(waiting,))
    job = Job(Settings(memory.limits), memory)
    told = [each for event in (found(), e.Tick()) for each in step(job, event, 0.0)]
    (left,) = [each.fields for each in told if isinstance(each, i.Record) and each.event == "worker_left"]
    assert (left["worker"], left["cause"], left["reason"]) == (0, cause, reason)
    assert [each.worker_id for each in told if isinstance(each, i.LaunchWorker)] == [1]


def test_what_is_left_of_workers_that_were_gone_before_is_no_news():
    """Their pods are kept for their logs, and found by every master anew."""
    memory = members_before(4, 5, next_id=6)
    job = Job(Settings(memory.limits, recovery_timeout=1.0), memory)
    over = [e.FoundWorker(number, over=True) for number in range(4)]
    events = [e.WorkersFound((*over, *found(4, 5).workers))]
    events += [e.WorkerExited(number, e.ExitCause.CRASHED, 1, "no good") for number in range(4)]
    events += [e.FromWorker(number, m.Hello("host", 1)) for number in (4, 5)]
    told = [each for event in events for each in job.step(event, 0.1)] + job.step(e.Tick(), 2.0)
    assert [it.event for it in told if isinstance(it, i.Record)] == ["master_restarted"]
    assert not any(isinstance(it, i.LaunchWorker) for it in told)
    assert [worker.worker_id for worker in job.workers] == [4, 5]


def test_it_is_said_when_the_state_was_lost_with_the_master():
    cluster = train(1, 1)
    report = m.StepReport(7, 0, 0.5, 32, 0.1, 0.05, 1, 224, False)
    cluster.post(e.FromWorker(0, m.Progress((report,), 100, 2)))
    cluster.die()
    cluster.exit(0)
    cluster.rise()
    cluster.live(5)
    (warning,) = cluster.warnings
    assert "held the state after step 7" in warning


# ---- the end ----


@pytest.mark.parametrize(
    ("event", "end"),
    [
        (e.StopRequested("enough"), i.EndJob(Phase.STOPPED, "enough")),
        (
            e.FromWorker(1, m.Failed(True, "ValueError: no", "Why", trained=True)),
            i.EndJob(Phase.FAILED, "ValueError: no", "Why"),
        ),
        (e.LauncherFailed("no such claim"), i.EndJob(Phase.FAILED, "no such claim")),
    ],
)
def test_an_end_that_was_decided_stays_decided_and_is_not_held_up_by_those_who_are_away(event, end):
    cluster = train()
    cluster.post(event)
    for worker in cluster.workers.values():
        worker.away = 6
    cluster.restart()
    assert cluster.phase is Phase.STOPPING
    cluster.live(30)
    assert (cluster.end, set(cluster.workers), len(cluster.worlds)) == (end, set(), 1)


def test_a_stop_is_not_held_up_by_those_who_have_not_come_back():
    cluster = train()
    for worker in cluster.workers.values():
        worker.away = 6
    cluster.restart()
    cluster.scale(1, 3)
    cluster.post(e.StopRequested("enough"))
    assert cluster.phase is Phase.STOPPING
    cluster.live(10)
    assert cluster.end == i.EndJob(Phase.STOPPED, "enough")


def test_who_has_finished_is_remembered_though_others_are_still_waited_for():
    world = World(1, tuple(Member(number, "h", 0, False) for number in (0, 1)), "")
    memory = members_before(1, next_id=2, world=world, finished=(0,))
    job = Job(Settings(memory.limits), memory)
    said = (e.WorkerDisconnected(1), e.FromWorker(1, m.Finished(9, 1, {})), e.FromWorker(1, m.Hello("h", 1, 1)))
    for event in (found(1), found(1), *said, e.Tick()):
        step(job, event, 0.1)
    assert job.reason == "training is complete"


def test_numbers_that_only_grow_make_no_difference():
    """But for the first step, after which a worker that cannot start is no reason to end the job."""
    job = Job(Settings(WorkerRange(minimum=1, maximum=1)))
    first, report = (m.StepReport(step, 0, 0.5, 32, 0.1, 0.05, 1, 32 * step, False) for step in (6, 7))
    assert i.SaveState() in job.step(e.FromWorker(0, m.Progress((first,), NEVER, 1)), 0.0)
    before = job.snapshot()
    told = job.step(e.FromWorker(0, m.Progress((report,), NEVER, 1)), 0.0)
    assert not any(isinstance(instruction, i.SaveState) for instruction in told)
    assert job.snapshot() == before
    assert job.snapshot().training.step == 7
    assert isinstance(job.step(e.Tick(), 1.0)[1], i.SaveState)
    assert job.snapshot() != before
