"""A job of a queue: what it tells the others of itself."""

from __future__ import annotations

import pytest
from master_kit import Cluster, killed, launched
from scaling_kit import report

from elasticdl.master.rules.sharing import UNSEEN, UNSEEN_SECONDS
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.claim import Claim
from elasticdl.master.state.speedup import Curve, Observation, Point


class Queued(Cluster):
    def __init__(self, minimum, maximum):
        super().__init__(minimum, maximum, share_queue="team", job_name="a")

    @property
    def claim(self):
        """The newest."""
        return self.all(i.PublishClaim)[-1].claim

    def no_room(self, *worker_ids):
        """For those that were asked for, as soon as that is done."""
        while not self.workers.keys() & set(worker_ids):
            self.post(e.Tick())
            self.now += 0.1
        for worker_id in worker_ids:
            self.workers.pop(worker_id)
            self.post(e.WorkerPending(worker_id, "no room"))

    def sees(self, *claims, times=1):
        for _ in range(times):
            self.post(e.NeighboursSeen(claims))
            self.live(2)

    def train(self, first, count=1):
        """So many steps, of 1000."""
        for step in range(first, first + count):
            self.now += 0.5
            self.post(e.ProgressReported(0, (report(0.5, world=self.version, step=step),), 1000, 1))
        self.post(e.Tick())


def alone(minimum, maximum):
    """It has seen that there is no other job, and asks for as many workers as it may have."""
    cluster = Queued(minimum, maximum)
    cluster.post(e.WorkersFound(()), e.Tick(), *[e.NeighboursSeen(())] * 3)
    assert len(cluster.workers) == maximum
    return cluster


@pytest.mark.parametrize(
    ("news", "places"),
    [
        ((), (1, 0)),  # asked for: that there is no place is told in moments
        ((e.WorkerPending(0, "0/2 nodes are available"),), (0, 1)),
        ((e.WorkerPending(0, "no room"), e.WorkerPending(0, "it is being started on node n", "n")), (1, 0)),
        ((e.WorkerPlaced(0, "h", 1, "n"),), (1, 0)),
        ((e.WorkerExited(0, e.ExitCause.PREEMPTED, -9, "preempted"), e.WorkerPending(1, "no room")), (0, 1)),
    ],
)
def test_a_worker_has_its_place_from_when_its_node_is_known(news, places):
    """Its image may take minutes, and nobody else can have the place meanwhile."""
    cluster = Queued(1, 1)
    cluster.post(e.WorkersFound(()), e.Tick(), *news, e.Tick())
    assert (cluster.claim.held, cluster.claim.waiting) == places


def test_it_says_for_how_long_it_has_waited_and_got_no_further_place():
    cluster = alone(1, 2)
    cluster.live(3)
    cluster.exit(1, e.ExitCause.PREEMPTED)
    cluster.no_room(2)
    cluster.live(70)
    assert cluster.claim.waited == pytest.approx(70, abs=1.0)
    cluster.exit(0, e.ExitCause.PREEMPTED)
    cluster.no_room(3)
    cluster.live(1)
    assert cluster.claim.waited < 2
    cluster.post(*(e.WorkerPlaced(worker_id, "h", 1) for worker_id in (2, 3)))
    cluster.live(1)
    assert cluster.claim.waited == 0


def test_the_work_that_is_left_is_what_one_worker_would_need_and_no_pause_changes_it():
    cluster = alone(1, 4)
    cluster.live(3)
    assert cluster.claim.left == -1, "nobody knows"
    cluster.train(1, 10)
    assert cluster.claim.left == pytest.approx(990 * 0.5 * 4**0.8, rel=0.1), "as such jobs are"
    four = tuple(Point(n, 0.9 * n, 0.8 * n, n, 0.9, 0.8, 1.0) for n in range(1, 5))
    cluster.post(e.ScalingLearnt(4, (Observation(4, 64, 0.5, 50, 0.1),), Curve(four)), e.Tick())
    assert cluster.claim.left == pytest.approx(990 * 0.5 * 3.6)
    cluster.now += 30.0
    cluster.post(e.Tick())
    assert cluster.claim.left == pytest.approx(990 * 0.5 * 3.6), "in an evaluation, or a slow step"
    cluster.exit(3, e.ExitCause.PREEMPTED)
    cluster.no_room(4)
    cluster.live(3)
    cluster.train(11)
    assert len(cluster.worlds[cluster.version].members) == 3
    assert cluster.claim.left == pytest.approx(990 * 0.5 * 3.6), "until the new number was measured"


# ---- what it does then ----


def of_other(held, waiting=0, minimum=1, left=1.0, gains=(1.0,) * 8):
    return Claim("b", held, waiting, minimum, 8, left, gains)


def test_as_long_as_another_needs_the_places_it_holds_it_gives_them_back():
    cluster = Queued(4, 8)
    cluster.post(e.WorkersFound(()), e.Tick())
    cluster.no_room(*range(1, 4))
    cluster.live(3)
    cluster.sees(of_other(3, minimum=4), times=2)
    cluster.live(3)
    assert not cluster.workers
    why = "0 of 4 places that the jobs of its queue have, less than its fewest, which are 4: others have theirs first"
    assert cluster.job.view().decision == why
    assert {worker.state for worker in cluster.job.view().workers} == {"draining"}
    cluster.sees(of_other(4, minimum=4), times=2)
    assert len(cluster.workers) == 4, "it asks again"
    told = [(fields["workers"], fields["reason"]) for fields in cluster.records("decision")]
    assert [workers for workers, _ in told] == [0, 4], "each change of its share stands in the journal, and no more"
    assert told[0][1] == why


def test_one_of_those_that_have_trained_keeps_the_state():
    cluster = Queued(3, 3)
    cluster.live(3)
    cluster.exit(2, e.ExitCause.PREEMPTED)
    cluster.no_room(3)
    cluster.sees(of_other(2, minimum=4), times=2)
    cluster.live(3)
    assert [worker.has_state for worker in cluster.workers.values()] == [True]
    cluster.sees(of_other(4, minimum=4), times=2)
    cluster.live(3)
    assert len(cluster.worlds[cluster.version].members) == 3
    assert not cluster.warnings


# ---- before it has seen the others ----


def test_it_begins_with_its_fewest_and_asks_for_more_when_it_has_seen_the_others():
    """Else it launches all, the others see places that do not exist, and at the first look most are killed again."""
    cluster = Queued(1, 8)
    cluster.live(2)
    assert launched(cluster.out) == [0]
    assert cluster.job.view().decision == UNSEEN
    cluster.sees(of_other(7, 1, left=1000.0, gains=(1.0,) + (0.8,) * 7), times=3)
    assert (launched(cluster.out), killed(cluster.out)) == ([0], [])
    cluster.sees(times=20)
    assert len(launched(cluster.out)) == 8


def test_a_master_that_is_started_again_keeps_those_that_are_there_until_it_has_seen_the_others():
    cluster = alone(1, 4)
    cluster.live(3)
    cluster.scale(1, 8)
    cluster.restart()
    cluster.live(4)
    assert sorted(cluster.workers) == launched(cluster.out) == [0, 1, 2, 3]
    assert cluster.job.view().decision == UNSEEN
    cluster.sees(times=20)
    assert (len(launched(cluster.out)), killed(cluster.out)) == (8, [])


def test_claims_that_can_not_be_read_hold_up_nobody_for_long():
    cluster = Queued(1, 4)
    cluster.live(UNSEEN_SECONDS - 1)
    assert len(launched(cluster.out)) == 1
    cluster.live(3)
    assert len(launched(cluster.out)) == 4
    cluster.restart()
    cluster.live(1)
    cluster.exit(3, e.ExitCause.PREEMPTED)
    cluster.live(UNSEEN_SECONDS - 4)
    assert len(launched(cluster.out)) == 4
    cluster.live(6)
    assert len(launched(cluster.out)) == 5
