"""A job that knows how it scales: what it says, how many workers it asks for, and what of that outlives it."""

from __future__ import annotations

import json

import pytest
from master_kit import Cluster, launched, step

from elasticdl.job import messages as m
from elasticdl.job.event_catalogue import KINDS
from elasticdl.master.core.job_core import Job
from elasticdl.master.rules.worker_target import LONGEST_BACKOFF
from elasticdl.master.shell.convert import to_event, to_message, to_status
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


class Sized(Cluster):
    """It has lived for a moment."""

    def __init__(self, minimum, maximum, policy="efficiency"):
        super().__init__(minimum, maximum, scale_policy=policy, min_efficiency=0.6)
        self.live(5)

    @property
    def sizes(self):
        return [len(self.worlds[version].members) for version in sorted(self.worlds)]

    @property
    def decision(self):
        return self.job.view().decision

    @property
    def target(self):
        return self.job.snapshot().target

    @property
    def rejected(self):
        return [each.workers for each in self.job.learnt.rejections]

    def learns(self, workers, *efficiencies, **more):
        self.post(learnt(workers, *efficiencies, **more))
        self.live(5)

    def resumes(self, text):
        self.post(e.FromWorker(0, m.Notice("resumed", {"step": 7, "learnt": text})))

    def told(self):
        return [(told.to, Learnt.from_json(told.message.json)) for told in self.all(m.Learnt)]


# ---- what it says ----

ONE, TWO = Point(1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), Point(2, 1.84, 1.7, 1.9, 0.84, 0.7, 0.9)
THREE, FOUR = Point(3, 2.6, 2.4, 2.71, 0.76, 0.6, 0.9), Point(4, 2.9, 2.7, 3.1, 0.3, -0.01, 0.5)
OF_TWO = "2 workers do 1.8 times the work of one (80 % interval 1.7 to 1.9)"
OF_THREE = (
    "3 workers do 2.6 times the work of one (80 % interval 2.4 to 2.7); a 4th would add 0.3 (80 % interval 0.0 to 0.5)"
)


@pytest.mark.parametrize(
    ("points", "workers", "said", "noise"),
    [
        ((ONE, TWO), 1, "a 2nd would add 0.8 (80 % interval 0.7 to 0.9)", None),
        ((ONE, TWO), 2, OF_TWO, None),
        ((ONE, TWO, THREE, FOUR), 3, OF_THREE, None),
        ((ONE, TWO, THREE, FOUR), 3, f"{OF_THREE}, counting that samples of larger batches are worth less", 500.0),
        ((ONE, TWO), 7, "", None),
        ((), 1, "", None),
        (
            (ONE, TWO, Point(3, 1.84, 1.7, 1.9, 0.04, -0.5, 0.1)),
            2,
            f"{OF_TWO}; a 3rd would add nothing that can be measured",
            None,
        ),
        ((ONE, TWO, Point(3, 1.84, 1.7, 1.9, -0.4, -0.5, -0.3)), 2, f"{OF_TWO}; a 3rd would make the job slower", None),
    ],
)
def test_the_advice_is_a_sentence(points, workers, said, noise):
    assert (Curve(points) if noise is None else Curve(points, noise=noise)).advice(workers) == said


def test_of_a_speedup_that_cannot_be_nothing_is_said_and_nothing_follows():
    """One worker was slow as it read its data for the first time: two did 18 times as much."""
    cluster = Sized(1, 8)
    cluster.learns(1, 1.0, 9.2, 9.0, observed=(2,))
    assert cluster.job.view().advice == ""
    assert (cluster.sizes, cluster.decision) == ([1], "starts with 1: how the job scales is not known yet")


def test_numbers_are_said_as_people_do():
    eighth = Curve((Point(7, 5.0, 4.0, 6.0, 0.5, 0.4, 0.6), Point(8, 5.5, 5.0, 6.0, 0.5, 0.4, 0.6)))
    assert "; an 8th would add 0.5 " in eighth.advice(7)
    assert [ordinal(n) for n in (1, 3, 11, 12, 21, 112)] == ["1st", "3rd", "11th", "12th", "21st", "112th"]


def test_it_is_in_the_journal_when_it_changes_and_in_the_status_at_once():
    cluster = Sized(2, 2, "all")
    cluster.post(learnt(2, 1.0, 0.9, 0.8))
    (first,) = cluster.records("advice")
    estimate = ", by estimate: no other number of workers was measured"
    assert first["text"] == f"{OF_TWO}; a 3rd would add 0.5 (80 % interval 0.4 to 0.6){estimate}"
    cluster.post(learnt(2, 1.0, 0.9, 0.8, observed=(1,)))
    assert cluster.job.view().advice == first["text"].removesuffix(estimate)
    assert first["curve"][1] == {"workers": 2, "speedup": 1.8, "low": 1.746, "high": 1.854, "gain": 0.5}
    json.dumps(first)
    cluster.live(40)
    cluster.post(learnt(2, 1.0, 0.88, 0.8))
    assert len(cluster.records("advice")) == 1
    assert cluster.job.view().advice.startswith("2 workers do 1.8 times")
    cluster.post(learnt(2, 1.0, 0.7, 0.5), learnt(2, 1.0, 0.9, 0.8))
    told = [each["text"][:16] for each in cluster.records("advice")]
    assert told == ["2 workers do 1.8", "2 workers do 1.4"], "not often"
    status = to_status("job", cluster.job, cluster.now, 1.0)
    assert (status.advice, status.decision) == (cluster.job.view().advice, "")
    assert {"advice", "decision"} <= KINDS.keys()


# ---- how many workers it asks for ----


def test_it_grows_as_long_as_that_pays_and_goes_back_if_not():
    cluster = Sized(1, 8)
    assert cluster.sizes == [1]
    cluster.learns(1, 1.0, 0.9, 0.8, 0.7)
    cluster.learns(2, 1.0, 0.9, 0.7, 0.59)
    cluster.learns(3, 1.0, 0.8, 0.5, 0.4)
    assert cluster.sizes == [1, 2, 3, 2]
    assert [each["workers"] for each in cluster.records("decision")] == [2, 3, 2]
    left = cluster.records("decision")[-1]["reason"]
    assert left == "goes back to 2: of 3 workers each does 0.50 of what one does alone, less than --min_efficiency 0.6"
    assert [drained.message.reason for drained in cluster.all(m.Drain)] == [left]
    cluster.post(learnt(2, 1.0, 0.8, 0.5))
    assert cluster.decision.startswith("stays at 2: of 3 workers each would do 0.50")


def test_what_was_learnt_of_another_number_decides_nothing():
    """It is a moment old: meanwhile a worker was lost."""
    cluster = Sized(1, 4)
    cluster.learns(2, 1.0, 0.9, 0.9)
    assert cluster.sizes == [1]


def test_as_long_as_there_is_no_place_it_asks_for_no_more():
    cluster = Sized(1, 8)
    cluster.post(learnt(1, 1.0, 0.9, 0.9, 0.9), e.Tick())
    (new,) = launched(cluster.out)[1:]
    cluster.workers.pop(new)
    cluster.post(e.WorkerPending(new, "no place"))
    cluster.learns(1, *[1.0] * 8)
    assert cluster.target == len(launched(cluster.out)) == 2


def test_the_users_range_is_kept_and_a_reason_of_another_range_is_not_shown():
    cluster = Sized(1, 8)
    cluster.scale(3, 4)
    cluster.live(5)
    assert cluster.sizes[-1] == 3
    cluster.learns(3, *[0.99] * 8)
    assert cluster.sizes[-1] == 4
    cluster.post(learnt(4, *[0.99] * 8))
    assert cluster.decision == "stays at 4: --num_workers allows no more"
    cluster.scale(1, 2)
    cluster.post(learnt(3, *[0.99] * 8))
    assert cluster.records("decision")[-1] == {"workers": 2, "reason": "goes to 2: the job was scaled to 1-2"}
    cluster.live(5)
    assert cluster.sizes[-1] == 2
    cluster.scale(1, 4)
    assert cluster.decision == "stays at 2: the job was scaled to 1-4, and nothing was measured since"
    cluster.scale(1, 1)
    assert cluster.records("decision")[-1] == {"workers": 1, "reason": "goes to 1: the job was scaled to 1"}


def test_the_cost_of_a_change_is_the_median_pause():
    cluster = Sized(1, 8)
    cluster.post(*(e.FromWorker(0, m.Notice("pause", {"total": seconds})) for seconds in (700.0, 800.0, 0.1)))
    cluster.post(learnt(1, 1.0, 0.99))
    assert cluster.target == 1
    assert "would gain less than the change costs" in cluster.decision


# ---- what outlives it ----


def test_another_master_goes_on_with_the_target_and_what_was_learnt():
    cluster = Sized(1, 8)
    cluster.learns(1, 1.0, 0.9, 0.5)
    cluster.learns(2, 1.0, 0.5, 0.3)
    cluster.die()
    assert step(Job(cluster.settings, cluster.saved), learnt(1, 1.0, 0.9), 0.0) == [], "it still listens"
    cluster.rise()
    cluster.live(10)
    snapshot = cluster.job.snapshot()
    assert (snapshot.target, snapshot.learnt) == (1, cluster.saved.learnt)
    assert [(each.workers, each.backoff) for each in snapshot.learnt.rejections] == [(2, 600.0)]
    cluster.post(learnt(1, 1.0, 0.61, observed=[2]))
    assert cluster.target == 1, "what was rejected stays so"
    text = Snapshot(snapshot, 0.0).to_json()
    assert Snapshot.from_json(text).job == snapshot
    assert len(text) < 20_000


def test_what_a_checkpoint_says_is_taken_up():
    past = Learnt((SEEN,), (Rejection(2, 100.0, 600.0),))
    fields = {"step": 7, "epoch": 1, "samples": 448, "path": "there"}
    told = json.dumps({**fields, "learnt": past.to_json()})
    cluster = Sized(1, 4)
    cluster.post(to_event(0, pb.WorkerMessage(notice=pb.Notice(event="resumed", fields_json=told))))
    assert [it.learnt for it in cluster.all(i.Recall)] == [past]
    assert cluster.records("resumed") == [{**fields, "worker": 0}]
    cluster.post(learnt(1, 1.0, 0.61, observed=[2]))
    assert cluster.target == 1


@pytest.mark.parametrize(("dropped", "left", "target"), [(True, 100.0, 2), (False, 1e12, 1)])
def test_what_did_not_pay_with_another_batch_is_tried(dropped, left, target):
    """The observations of another batch are dropped, and so what followed from them; and none counts for longer than any."""
    cluster = Sized(1, 4)
    cluster.resumes(Learnt((SEEN,), (Rejection(2, left, left),)).to_json())
    cluster.post(learnt(1, 1.0, 0.99, dropped=dropped))
    assert cluster.target == target
    cluster.now += LONGEST_BACKOFF
    cluster.post(learnt(1, 1.0, 0.99, observed=[2]))
    assert cluster.target == 2


def test_a_back_off_is_kept_by_the_next_master_though_the_measurement_is_forgotten():
    """That more workers were slower is forgotten after ten minutes, and their back-off may be four hours."""
    cluster = Sized(1, 4)
    cluster.resumes(Learnt((SEEN,), (Rejection(2, 14_000.0, 14_400.0),), (Forgotten(2, 3),)).to_json())
    forgotten = (Forgotten(2, 3), Forgotten(3, 1))
    cluster.post(learnt(1, 1.0, 0.99, forgotten=forgotten))
    assert (cluster.target, cluster.rejected) == (1, [2])
    assert Learnt.from_json(cluster.job.learnt.to_json()).forgotten == forgotten


def test_a_job_that_learns_nothing_itself_keeps_what_the_last_one_has_learnt():
    """It may be over, or stopped, before it knows."""
    past = Learnt((SEEN,), (Rejection(2, 100.0, 600.0),))
    cluster = Sized(1, 4, "all")
    cluster.resumes(past.to_json())
    assert cluster.job.learnt == past
    assert cluster.told() == [((0, 1, 2, 3), past)]


def test_members_are_told_what_a_checkpoint_is_to_hold_as_soon_as_they_can_be():
    cluster = Cluster(1, 1, scale_policy="efficiency", min_efficiency=0.6)
    cluster.post(e.WorkersFound(()), learnt(1, 1.0, 0.9))
    cluster.live(5)
    assert not cluster.all(m.Learnt)
    cluster.post(learnt(1, 1.0, 0.9), learnt(1, 1.0, 0.9))
    (told,) = cluster.all(m.Learnt)  # again only when it changes
    assert (told.to, Learnt.from_json(to_message(told.message).learnt.json)) == ((0,), cluster.job.learnt)


def test_however_many_numbers_did_not_pay_the_next_master_can_read_it():
    cluster = Sized(1, 99)
    cluster.job.sizing._policy.recall([Rejection(n, 1.0, 600.0) for n in range(2, 99)], cluster.now)
    cluster.post(learnt(1, 1.0, 0.9))
    text = Snapshot(cluster.job.snapshot(), 0.0).to_json()
    assert [each.workers for each in Snapshot.from_json(text).job.learnt.rejections] == list(range(2, 34))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it has format None, not 1"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"format": 1, "observations": [{"workers": 0}]}', "observations.0.workers: Input should be greater"),
        (Learnt((SEEN,)).to_json().replace("0.6", "NaN"), "observations.0.seconds: Input should be a finite number"),
        (Learnt((SEEN,)).to_json().replace("0.1", "1e300"), "observations.0.spread: Input should be less than"),
        (Learnt((SEEN,) * 32).to_json().replace("]", "," + '{"workers": 1}' + "]", 1), "observations.32"),
    ],
)
def test_what_can_not_be_used_is_a_warning(text, reason):
    cluster = Sized(1, 4)
    cluster.resumes(text)
    (warning,) = cluster.warnings
    assert warning.startswith(f"what the checkpoint says of how the job scales can't be used: {reason}")
    assert "\n" not in warning
    assert not cluster.all(i.Recall)
