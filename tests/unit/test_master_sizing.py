"""A job that knows how it scales: what it says, how many workers it asks for, and what of that outlives it."""

from __future__ import annotations

import json
import sys
import time

import pytest
from master_kit import Cluster, step
from scaling_kit import report

from elasticdl.job.event_catalogue import KINDS
from elasticdl.job.shared_values import Pace
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.rules.worker_target import LONGEST_BACKOFF
from elasticdl.master.shell.convert import to_event, to_message, to_status
from elasticdl.master.shell.scaling_observer import FIRST_SECONDS, ScalingObserver
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.learnt import Forgotten, Learnt, Rejection
from elasticdl.master.state.snapshot import Snapshot
from elasticdl.master.state.speedup import Curve, Observation, Point, ordinal
from elasticdl.proto import elasticdl_pb2 as pb

SEEN = Observation(2, 64, 0.6, 50, 0.1, 0.5)


def learnt(workers, *efficiencies, observed=(), **more):
    points = [Point(n, n * x, 0.97 * n * x, 1.03 * n * x, 0.5, 0.4, 0.6) for n, x in enumerate(efficiencies, 1)]
    seen = [Observation(n, 64, 1.0 / n, 50, 0.1) for n in (*observed, workers)]
    return e.ScalingLearnt(workers, tuple(seen), Curve(tuple(points)), **more)


def efficient(minimum, maximum, **more):
    return Cluster(minimum, maximum, scale_policy="efficiency", min_efficiency=0.6, **more)


def members(cluster):
    return [len(cluster.worlds[version].members) for version in sorted(cluster.worlds)]


def records(cluster, event):
    return [it.fields for it in cluster.story if isinstance(it, i.Record) and it.event == event]


# ---- what it says ----


def test_the_advice_is_a_sentence():
    curve = Curve((Point(1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), Point(2, 1.84, 1.7, 1.9, 0.84, 0.7, 0.9)))
    third = Curve((*curve.points, Point(3, 2.6, 2.4, 2.71, 0.76, 0.6, 0.9), Point(4, 2.9, 2.7, 3.1, 0.3, -0.01, 0.5)))
    assert curve.advice(1) == "a 2nd would add 0.8 (80 % interval 0.7 to 0.9)"
    assert curve.advice(2) == "2 workers do 1.8 times the work of one (80 % interval 1.7 to 1.9)"
    assert third.advice(3) == (
        "3 workers do 2.6 times the work of one (80 % interval 2.4 to 2.7); a 4th would add 0.3 (80 % interval 0.0 to 0.5)"
    )
    assert (
        Curve(third.points, noise=500.0).advice(3).endswith(", counting that samples of larger batches are worth less")
    )
    assert curve.advice(7) == Curve().advice(1) == ""
    for gain, high, said in (
        (0.04, 0.1, "a 3rd would add nothing that can be measured"),
        (-0.4, -0.3, "a 3rd would make the job slower"),
    ):
        more = Curve((*curve.points, Point(3, 1.84, 1.7, 1.9, gain, -0.5, high)))
        assert more.advice(2).endswith(f"; {said}")
    eighth = Curve((Point(7, 5.0, 4.0, 6.0, 0.5, 0.4, 0.6), Point(8, 5.5, 5.0, 6.0, 0.5, 0.4, 0.6)))
    assert "; an 8th would add 0.5 " in eighth.advice(7)
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "21st",
        "112th",
    ]


def test_it_is_in_the_journal_when_it_changes_and_in_the_status_at_once():
    cluster = Cluster(2, 2)
    cluster.live(3)
    cluster.post(learnt(2, 1.0, 0.9, 0.8))
    (first,) = records(cluster, "advice")
    assert first["text"] == (
        "2 workers do 1.8 times the work of one (80 % interval 1.7 to 1.9); a 3rd would add 0.5 (80 % interval 0.4 to 0.6)"
    )
    assert first["curve"][1] == {"workers": 2, "speedup": 1.8, "low": 1.746, "high": 1.854, "gain": 0.5}
    json.dumps(first)
    cluster.live(40)
    cluster.post(learnt(2, 1.0, 0.88, 0.8))
    assert len(records(cluster, "advice")) == 1
    assert cluster.job.view().advice.startswith("2 workers do 1.8 times")
    cluster.post(learnt(2, 1.0, 0.7, 0.5))
    assert [each["text"][:16] for each in records(cluster, "advice")] == ["2 workers do 1.8", "2 workers do 1.4"]
    cluster.post(learnt(2, 1.0, 0.9, 0.8))
    assert len(records(cluster, "advice")) == 2, "not often"
    status = to_status("job", cluster.job, cluster.now, 1.0)
    assert (status.advice, status.decision) == (cluster.job.view().advice, "")
    assert {"advice", "decision"} <= KINDS.keys()


def test_without_the_policy_there_are_all_workers_whatever_they_bring():
    cluster = Cluster(1, 4)
    cluster.live(3)
    cluster.post(learnt(4, 1.0, 0.3, 0.2, 0.1))
    cluster.live(3)
    assert members(cluster)[-1] == 4
    assert not records(cluster, "decision")


# ---- how many workers it asks for ----


def test_it_grows_as_long_as_that_pays_and_goes_back_if_not():
    cluster = efficient(1, 8)
    cluster.live(5)
    assert members(cluster) == [1]
    cluster.post(learnt(1, 1.0, 0.9, 0.8, 0.7))
    cluster.live(5)
    cluster.post(learnt(2, 1.0, 0.9, 0.7, 0.59))
    cluster.live(5)
    cluster.post(learnt(3, 1.0, 0.8, 0.5, 0.4))
    cluster.live(5)
    assert members(cluster) == [1, 2, 3, 2]
    assert [each["workers"] for each in records(cluster, "decision")] == [2, 3, 2]
    left = records(cluster, "decision")[-1]["reason"]
    assert left == "goes back to 2: of 3 workers each does 0.50 of what one does alone, less than --min_efficiency 0.6"
    (drained,) = [it for it in cluster.story if isinstance(it, i.DrainWorker)]
    assert drained.reason == left
    cluster.post(learnt(2, 1.0, 0.8, 0.5))
    assert cluster.job.view().decision.startswith("stays at 2: of 3 workers each would do 0.50")


def test_what_was_learnt_of_another_number_decides_nothing():
    """It is a moment old: meanwhile a worker was lost."""
    cluster = efficient(1, 4)
    cluster.live(5)
    cluster.post(learnt(2, 1.0, 0.9, 0.9))
    cluster.live(5)
    assert members(cluster) == [1]


def test_who_is_lost_is_replaced_up_to_the_target():
    cluster = efficient(1, 8)
    cluster.live(5)
    cluster.post(learnt(1, 1.0, 0.9, 0.3))
    cluster.live(5)
    cluster.exit(max(cluster.workers), e.ExitCause.PREEMPTED)
    cluster.live(8)
    assert members(cluster) == [1, 2, 1, 2]


def test_as_long_as_there_is_no_place_it_asks_for_no_more():
    cluster = efficient(1, 8)
    cluster.live(5)
    cluster.post(learnt(1, 1.0, 0.9, 0.9, 0.9))
    cluster.post(e.Tick())
    (new,) = [it.worker_id for it in cluster.story if isinstance(it, i.LaunchWorker)][1:]
    cluster.workers.pop(new)
    cluster.post(e.WorkerPending(new, "no place"))
    cluster.post(learnt(1, *[1.0] * 8))
    cluster.live(5)
    assert cluster.job.snapshot().target == 2
    assert len([it for it in cluster.story if isinstance(it, i.LaunchWorker)]) == 2


def test_the_users_range_is_kept():
    cluster = efficient(1, 8)
    cluster.live(5)
    cluster.limits = WorkerRange(minimum=3, maximum=4)
    cluster.post(e.ScaleRequested(cluster.limits))
    cluster.live(5)
    assert members(cluster)[-1] == 3
    cluster.post(learnt(3, *[0.99] * 8))
    cluster.live(5)
    assert members(cluster)[-1] == 4
    cluster.limits = WorkerRange(minimum=1, maximum=2)
    cluster.post(e.ScaleRequested(cluster.limits))
    cluster.post(learnt(3, *[0.99] * 8))
    assert records(cluster, "decision")[-1] == {"workers": 2, "reason": "goes to 2: the job was scaled to 1-2"}
    cluster.live(5)
    assert members(cluster)[-1] == 2
    assert cluster.job.view().limits == cluster.limits


def test_a_reason_of_another_range_is_not_shown():
    cluster = efficient(1, 2)
    cluster.live(5)
    cluster.post(learnt(1, 1.0, 0.9))
    cluster.live(5)
    cluster.post(learnt(2, 1.0, 0.9))
    assert cluster.job.view().decision == "stays at 2: --num_workers allows no more"
    cluster.limits = WorkerRange(minimum=1, maximum=4)
    cluster.post(e.ScaleRequested(cluster.limits))
    assert cluster.job.view().decision == "stays at 2: the job was scaled to 1-4, and nothing was measured since"
    cluster.limits = WorkerRange(minimum=1, maximum=1)
    cluster.post(e.ScaleRequested(cluster.limits))
    assert records(cluster, "decision")[-1] == {"workers": 1, "reason": "goes to 1: the job was scaled to 1"}


def test_a_job_that_ends_gives_no_reason_for_its_number_of_workers():
    cluster = efficient(1, 2)
    cluster.live(5)
    cluster.post(learnt(1, 1.0, 0.2))
    assert cluster.job.view().decision
    cluster.post(e.StopRequested("enough"))
    assert not cluster.job.view().decision


def test_the_cost_of_a_change_is_the_median_pause():
    cluster = efficient(1, 8)
    cluster.live(5)
    for seconds in (700.0, 800.0, 0.1):
        cluster.post(e.NoticeReported(0, "pause", {"total": seconds}))
    cluster.post(learnt(1, 1.0, 0.99))
    assert cluster.job.snapshot().target == 1
    assert "would gain less than the change costs" in cluster.job.view().decision


# ---- what outlives it ----


def test_another_master_goes_on_with_the_target_and_what_was_learnt():
    cluster = efficient(1, 8)
    cluster.live(5)
    cluster.post(learnt(1, 1.0, 0.9, 0.5))
    cluster.live(5)
    cluster.post(learnt(2, 1.0, 0.5, 0.3))
    cluster.live(5)
    cluster.restart()
    cluster.live(10)
    snapshot = cluster.job.snapshot()
    assert snapshot.target == 1
    assert snapshot.learnt == cluster.saved.learnt
    assert [(each.workers, each.backoff) for each in snapshot.learnt.rejections] == [(2, 600.0)]
    cluster.post(learnt(1, 1.0, 0.61, observed=[2]))
    assert cluster.job.snapshot().target == 1, "what was rejected stays so"
    text = Snapshot(snapshot, 0.0).to_json()
    assert Snapshot.from_json(text).job == snapshot
    assert len(text) < 20_000


def test_members_are_told_what_a_checkpoint_is_to_hold_when_it_changes():
    cluster = efficient(2, 2)
    cluster.live(5)
    for _ in range(2):
        cluster.post(learnt(2, 1.0, 0.9))
    (told,) = [it for it in cluster.story if isinstance(it, i.TellLearnt)]
    assert told.worker_ids == (0, 1)
    message = to_message(told)
    assert Learnt.from_json(message.learnt.json) == cluster.job.learnt


def test_what_a_checkpoint_says_is_taken_up():
    text = Learnt((SEEN,), (Rejection(2, 100.0, 600.0),)).to_json()
    fields = {"step": 7, "epoch": 1, "samples": 448, "path": "there", "learnt": text}
    notice = pb.WorkerMessage(notice=pb.Notice(event="resumed", fields_json=json.dumps(fields)))
    cluster = efficient(1, 4)
    cluster.live(5)
    cluster.post(to_event(0, notice))
    recalled = [it.learnt for it in cluster.story if isinstance(it, i.Recall)]
    assert recalled == [Learnt.from_json(text)]
    assert records(cluster, "resumed") == [{"step": 7, "epoch": 1, "samples": 448, "path": "there", "worker": 0}]
    cluster.post(learnt(1, 1.0, 0.61, observed=[2]))
    assert cluster.job.snapshot().target == 1


def test_what_did_not_pay_with_another_batch_is_tried():
    """The observations of another batch are dropped, and so what followed from them; and none counts for longer than any."""
    for dropped, left in ((True, 100.0), (False, 1e12)):
        text = Learnt((SEEN,), (Rejection(2, left, left),)).to_json()
        cluster = efficient(1, 4)
        cluster.live(5)
        cluster.post(e.NoticeReported(0, "resumed", {"step": 7, "learnt": text}))
        cluster.post(learnt(1, 1.0, 0.99, dropped=dropped))
        assert cluster.job.snapshot().target == (2 if dropped else 1)
        cluster.now += LONGEST_BACKOFF
        cluster.post(learnt(1, 1.0, 0.99, observed=[2]))
        assert cluster.job.snapshot().target == 2


def test_a_back_off_is_kept_by_the_next_master_though_the_measurement_is_forgotten():
    """That more workers were slower is forgotten after ten minutes, and their back-off may be four hours."""
    posted, clock = [], Clock()
    slower = (Observation(1, 64, 1.0, 50, 0.02), Observation(2, 64, 0.9, 50, 0.02), Observation(3, 64, 1.1, 50, 0.02))
    past = Learnt(slower, (Rejection(2, 14_000.0, 14_400.0),), (Forgotten(2, 3),))
    clock.now += 1000.0
    it = observer(posted, clock, past, scale_policy="efficiency")
    clock.now += 1000.0
    train(it, clock, workers=1, seconds=0.8)
    wait_for(posted, 1)
    it.close()
    (event,) = posted
    assert not event.dropped
    assert [each.workers for each in event.observations] == [1, 2]
    assert event.forgotten == (Forgotten(2, 3), Forgotten(3, 1))
    cluster = efficient(1, 4)
    cluster.live(5)
    cluster.post(e.NoticeReported(0, "resumed", {"step": 7, "learnt": past.to_json()}))
    cluster.post(learnt(1, 1.0, 0.99, forgotten=event.forgotten))
    assert cluster.job.snapshot().target == 1
    assert [each.workers for each in cluster.job.learnt.rejections] == [2]
    assert Learnt.from_json(cluster.job.learnt.to_json()).forgotten == event.forgotten


def test_a_job_that_learns_nothing_itself_keeps_what_the_last_one_has_learnt():
    """It may be over, or stopped, before it knows."""
    past = Learnt((SEEN,), (Rejection(2, 100.0, 600.0),))
    cluster = Cluster(1, 4)
    cluster.live(5)
    cluster.post(e.NoticeReported(0, "resumed", {"step": 7, "learnt": past.to_json()}))
    assert cluster.job.learnt == past
    (told,) = [it for it in cluster.story if isinstance(it, i.TellLearnt)]
    assert (told.worker_ids, Learnt.from_json(told.json)) == ((0, 1, 2, 3), past)


def test_who_can_not_be_told_now_is_told_later():
    cluster = efficient(1, 1)
    cluster.post(e.WorkersFound(()))
    cluster.post(learnt(1, 1.0, 0.9))
    cluster.live(5)
    assert not [it for it in cluster.story if isinstance(it, i.TellLearnt)]
    cluster.post(learnt(1, 1.0, 0.9))
    assert [it.worker_ids for it in cluster.story if isinstance(it, i.TellLearnt)] == [(0,)]


def test_however_many_numbers_did_not_pay_the_next_master_can_read_it():
    cluster = efficient(1, 99)
    cluster.live(5)
    cluster.job._workers.sizing._policy.recall([Rejection(n, 1.0, 600.0) for n in range(2, 99)], cluster.now)
    cluster.post(learnt(1, 1.0, 0.9))
    text = Snapshot(cluster.job.snapshot(), 0.0).to_json()
    assert [each.workers for each in Snapshot.from_json(text).job.learnt.rejections] == list(range(2, 34))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it has format None, not 1"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"format": 2}', "it has format 2, not 1"),
        ('{"format": 1, "observations": [{"workers": 0}]}', "observations.0.workers: Input should be greater"),
        ('{"format": 1, "observations": "many"}', "observations: Input should be a valid"),
        (Learnt((SEEN,)).to_json().replace("0.6", "NaN"), "observations.0.seconds: Input should be a finite number"),
        (Learnt((SEEN,)).to_json().replace("0.6", "1e300"), "observations.0.seconds: Input should be less than"),
        (Learnt((SEEN,)).to_json().replace("0.1", "1e300"), "observations.0.spread: Input should be less than"),
        (Learnt((SEEN,) * 32).to_json().replace("]", "," + '{"workers": 1}' + "]", 1), "observations.32"),
    ],
)
def test_what_can_not_be_used_is_a_warning(text, reason):
    cluster = efficient(1, 4)
    cluster.live(5)
    cluster.post(e.NoticeReported(0, "resumed", {"step": 7, "learnt": text}))
    (warning,) = records(cluster, "warning")
    assert warning["message"].startswith(f"what the checkpoint says of how the job scales can't be used: {reason}")
    assert "\n" not in warning["message"]
    assert not [it for it in cluster.story if isinstance(it, i.Recall)]


# ---- who measures ----


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def observer(posted, clock, past=None, limits=None, **fields):
    spec = JobSpec(global_batch_size=64, **fields)
    return ScalingObserver(spec, lambda: limits or spec.num_workers, past or Learnt(), posted.append, clock)


def train(it, clock, *, workers, seconds, world=1, count=40):
    it.recorded("world_formed", {"world": world, "members": list(range(workers))})
    clock.now += FIRST_SECONDS
    for _ in range(count):
        it.trained([report(seconds, world=world)], Pace(busy=0.8 * seconds))


def wait_for(posted, count, seconds=20.0):
    deadline = time.monotonic() + seconds
    while len(posted) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(posted) == count


def test_what_the_steps_tell_is_posted_from_a_thread():
    posted, clock = [], Clock()
    it = observer(posted, clock)
    train(it, clock, workers=1, seconds=1.0)
    assert not posted, "one worker says nothing of more, and nobody asks"
    train(it, clock, workers=2, seconds=0.6, world=2)
    wait_for(posted, 1)
    (event,) = posted
    assert event.workers == 2
    assert [each.workers for each in event.observations] == [1, 2]
    assert event.curve.at(2).speedup == pytest.approx(1 / 0.6, rel=0.05)
    it.close()


def test_the_policy_asks_with_one_worker_too():
    posted, clock = [], Clock()
    it = observer(posted, clock, scale_policy="efficiency")
    train(it, clock, workers=1, seconds=1.0)
    wait_for(posted, 1)
    it.close()


def test_the_curve_goes_as_far_as_the_job_was_scaled():
    posted, clock = [], Clock()
    it = observer(posted, clock, limits=WorkerRange(minimum=1, maximum=64), num_workers="1-4")
    train(it, clock, workers=10, seconds=0.1)
    wait_for(posted, 1)
    assert max(point.workers for point in posted[0].curve) == 20
    it.close()


def test_it_asks_seldom():
    posted, clock = [], Clock()
    it = observer(posted, clock)
    train(it, clock, workers=2, seconds=0.1, count=500)
    wait_for(posted, 1)
    clock.now += FIRST_SECONDS
    train(it, clock, workers=2, seconds=0.1, count=1)
    wait_for(posted, 2)
    train(it, clock, workers=2, seconds=0.1, count=1)
    it.recorded("scale_requested", {"workers": "1-8"})
    it.trained([report(0.1)], Pace())
    wait_for(posted, 3)
    it.close()


def test_what_was_recalled_counts_unless_it_is_of_another_batch():
    posted, clock = [], Clock()
    other = Observation(3, 128, 0.5, 50, 0.1)
    it = observer(posted, clock, Learnt((Observation(1, 64, 1.0, 50, 0.1), other)))
    train(it, clock, workers=2, seconds=0.6)
    wait_for(posted, 1)
    assert [each.workers for each in posted[0].observations] == [1, 2]
    it.close()


def test_what_was_recalled_is_dropped_as_a_whole_if_all_of_it_is_of_another_batch_or_of_another_time():
    for seen, seconds, dropped in ((64, 1.0, False), (128, 1.0, True), (64, 2.0, True)):
        posted, clock = [], Clock()
        past = Learnt((Observation(1, seen, 1.0, 50, 0.1),), forgotten=(Forgotten(2, 1),))
        it = observer(posted, clock, past, scale_policy="efficiency")
        train(it, clock, workers=1, seconds=seconds)
        wait_for(posted, 1)
        it.close()
        assert (posted[0].dropped, posted[0].forgotten) == (dropped, () if dropped else past.forgotten)


def test_a_mistake_there_ends_it_and_not_the_job(caplog, monkeypatch):
    posted, clock = [], Clock()
    it = observer(posted, clock)
    monkeypatch.setattr("elasticdl.master.rules.step_time.fit", lambda *given, **named: 1 / 0)
    train(it, clock, workers=2, seconds=0.6)
    it.close()
    assert "how the job scales is not looked at any more" in caplog.text
    assert not posted


def test_without_numpy_it_is_said_what_is_missing(caplog, monkeypatch):
    posted, clock = [], Clock()
    it = observer(posted, clock)
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "elasticdl.master.rules.step_time", raising=False)
    train(it, clock, workers=2, seconds=0.6)
    it.close()
    (line,) = caplog.messages
    assert "numpy" in line
    assert "[worker]" in line
    assert not posted


def test_a_job_that_listens_after_a_restart_takes_none_of_it():
    cluster = efficient(1, 4)
    cluster.live(5)
    cluster.die()
    job = Job(cluster.settings, cluster.saved)
    assert step(job, learnt(1, 1.0, 0.9), 0.0) == []
