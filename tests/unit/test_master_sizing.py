"""A job that knows how it scales: what it says, how many workers it asks for, and what of that outlives it."""

from __future__ import annotations

import json

import pytest
from master_kit import Cluster, launched

from elasticdl.job import messages as m
from elasticdl.job.journal import KINDS
from elasticdl.master.core import events as e
from elasticdl.master.core.sizing import FIRST_SECONDS
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell.calls import to_status


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
        return self.job.size.decision

    @property
    def target(self):
        return self.job.snapshot().target

    def learns(self, efficiency, **more):
        """Each member does that part of what one does alone in a second."""
        self.train(1.0 / (len(self.members) * efficiency), **more)
        self.live(FIRST_SECONDS + 6)


# ---- what it says ----


def test_it_is_in_the_journal_when_it_changes_and_in_the_status_at_once():
    cluster = Sized(2, 2, "all")
    cluster.learns(0.9)
    (first,) = cluster.records("advice")
    assert first == {"text": "only 2 workers were measured, so what fewer or more would do is not known", "curve": []}


def test_what_was_measured_is_said_again_only_when_it_changes():
    cluster = Sized(1, 2, "all")
    cluster.scale(1, 1)
    cluster.live(5)
    cluster.learns(1.0)
    assert not cluster.records("advice"), "one worker says nothing of more"
    cluster.scale(2, 2)
    cluster.live(5)
    cluster.learns(0.9)
    (first,) = cluster.records("advice")
    assert first["text"].startswith(
        "2 workers do 1.8 times the work of one (each does 0.90 of one worker, measured); one more"
    )
    assert first["curve"][1] == {"workers": 2, "speedup": 1.8, "measured": True}
    json.dumps(first)
    cluster.live(40)
    cluster.learns(0.88, count=200)
    cluster.live(60)
    assert len(cluster.records("advice")) == 1
    assert "each does 0.88" in cluster.job.size.advice
    cluster.learns(0.7, count=200)
    cluster.live(60)
    told = [each["text"][:16] for each in cluster.records("advice")]
    assert told == ["2 workers do 1.8", "2 workers do 1.4"], "not often"
    status = to_status("job", cluster.job, cluster.now, 1.0)
    assert (status.advice, status.decision) == (cluster.job.size.advice, "")
    assert {"advice", "decision"} <= KINDS.keys()


def test_it_looks_seldom_and_at_once_when_the_range_is_another():
    cluster = Sized(2, 2, "all")
    cluster.train(0.5)
    cluster.live(FIRST_SECONDS - 1)
    assert not cluster.job.size.advice
    cluster.live(2)
    assert cluster.job.size.advice
    cluster.live(200)  # it would look again after up to a minute
    cluster.train(1.0, count=200)
    cluster.live(1)
    cluster.scale(1, 2)
    cluster.live(1)
    assert cluster.job.size._steps._known[2][1].seconds == pytest.approx(1.0)


# ---- how many workers it asks for ----


def test_it_grows_as_long_as_that_pays_and_goes_back_if_not():
    cluster = Sized(1, 8)
    assert cluster.sizes == [1]
    cluster.learns(1.0)
    cluster.learns(0.75)
    cluster.learns(0.5)
    assert cluster.sizes == [1, 2, 3, 2]
    assert [each["workers"] for each in cluster.records("decision")] == [2, 3, 2]
    left = cluster.records("decision")[-1]["reason"]
    assert left == "goes back to 2: of 3 workers each does 0.50 of what one does alone, less than --min_efficiency 0.6"
    assert [drained.message.reason for drained in cluster.all(m.Drain)] == [left]
    cluster.learns(0.75)
    assert cluster.decision.startswith("stays at 2: of 3 workers each did 0.50")


def test_what_was_learnt_of_another_number_decides_nothing():
    """Meanwhile a worker was lost."""
    cluster = Sized(1, 4)
    cluster.learns(1.0)
    cluster.train(0.5)
    cluster.exit(1)
    while launched(cluster.out)[-1] == 1:
        cluster.now += 0.1
        cluster.post(e.Tick())
    cluster.workers.pop(new := launched(cluster.out)[-1])
    cluster.post(e.WorkerPending(new, "no place"))
    cluster.live(20)
    assert (cluster.sizes[-1], cluster.target) == (1, 2)


def test_as_long_as_there_is_no_place_it_asks_for_no_more():
    cluster = Sized(1, 8)
    cluster.train(1.0)
    while cluster.target == 1:
        cluster.now += 1.0
        cluster.post(e.Tick())
    (new,) = launched(cluster.out)[1:]
    cluster.workers.pop(new)
    cluster.post(e.WorkerPending(new, "no place"))
    cluster.learns(1.0)
    assert cluster.target == len(launched(cluster.out)) == 2


def test_the_users_range_is_kept_and_a_reason_of_another_range_is_not_shown():
    cluster = Sized(1, 8)
    cluster.scale(3, 4)
    cluster.live(5)
    assert cluster.sizes[-1] == 3
    cluster.learns(0.99)
    assert cluster.sizes[-1] == 4
    cluster.learns(0.99)
    assert cluster.decision == "stays at 4: --num_workers allows no more"
    cluster.scale(1, 2)
    assert cluster.records("decision")[-1] == {"workers": 2, "reason": "goes to 2: the job was scaled to 1-2"}
    cluster.live(5)
    assert cluster.sizes[-1] == 2
    cluster.scale(1, 4)
    assert cluster.decision == "stays at 2: the job was scaled to 1-4, and nothing was measured since"
    cluster.scale(1, 1)
    assert cluster.records("decision")[-1] == {"workers": 1, "reason": "goes to 1: the job was scaled to 1"}


# ---- what outlives it ----


def test_another_master_goes_on_with_the_target_and_measures_anew():
    cluster = Sized(1, 8)
    cluster.learns(1.0)
    cluster.learns(0.9)
    assert cluster.sizes == [1, 2, 4]
    cluster.die()
    cluster.rise()
    cluster.live(10)
    snapshot = cluster.job.snapshot()
    assert (snapshot.target, cluster.job.size.advice) == (4, "")
    assert Snapshot.from_json(Snapshot(snapshot, 0.0).to_json()).job == snapshot
    cluster.learns(0.9)
    assert cluster.decision == "tries 5: how the job scales is not known yet"


def test_another_master_that_begins_with_the_most_workers_finds_out_whether_they_pay():
    cluster = Sized(1, 2)
    cluster.learns(1.0)
    cluster.die()
    cluster.rise()
    cluster.live(10)
    cluster.learns(0.5)
    assert (cluster.sizes[-1], cluster.records("decision")[-1]["workers"]) == (1, 1)
    cluster.learns(1.0)
    assert (cluster.target, cluster.decision[:12]) == (1, "stays at 1: ")
