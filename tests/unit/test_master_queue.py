"""A job of a queue: what it tells the others of itself."""

from __future__ import annotations

import pytest
from master_kit import Cluster
from scaling_kit import report

from elasticdl.job.spec import WorkerRange
from elasticdl.master.rules.sharing import UNSEEN, UNSEEN_SECONDS
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.claim import Claim
from elasticdl.master.state.speedup import Curve, Observation, Point


def sharing(minimum, maximum, **more):
    return Cluster(minimum, maximum, share_queue="team", job_name="a", **more)


def alone(minimum, maximum, **more):
    """It has seen that there is no other job, and asks for as many workers as it may have."""
    cluster = sharing(minimum, maximum, **more)
    for event in (e.WorkersFound(()), e.Tick(), *[e.NeighboursSeen(())] * 3):
        cluster.post(event)
    assert len(cluster.workers) == maximum
    return cluster


def claimed(cluster):
    """The newest claim."""
    return [it.claim for it in cluster.story if isinstance(it, i.PublishClaim)][-1]


def no_room(cluster, *worker_ids):
    """For those that were asked for, as soon as that is done."""
    while not cluster.workers.keys() & set(worker_ids):
        cluster.post(e.Tick())
        cluster.now += 0.1
    for worker_id in worker_ids:
        cluster.workers.pop(worker_id)
        cluster.post(e.WorkerPending(worker_id, "no room"))


@pytest.mark.parametrize(
    ("news", "places"),
    [
        ((), (1, 0)),  # asked for: that there is no place is told in moments
        ((e.WorkerPending(0, "0/2 nodes are available"),), (0, 1)),
        ((e.WorkerPending(0, "no room"), e.WorkerPending(0, "it is being started on node n", "n")), (1, 0)),
        ((e.WorkerPending(0, "the image can't be pulled", "n"),), (1, 0)),
        ((e.WorkerPlaced(0, "h", 1, "n"),), (1, 0)),
        ((e.WorkerExited(0, e.ExitCause.PREEMPTED, -9, "preempted"), e.WorkerPending(1, "no room")), (0, 1)),
    ],
)
def test_a_worker_has_its_place_from_when_its_node_is_known(news, places):
    """Its image may take minutes, and nobody else can have the place meanwhile."""
    cluster = sharing(1, 1)
    cluster.post(e.WorkersFound(()))
    for event in (e.Tick(), *news, e.Tick()):
        cluster.post(event)
    assert (claimed(cluster).held, claimed(cluster).waiting) == places


def test_it_says_for_how_long_it_has_waited_and_got_no_further_place():
    cluster = alone(1, 2)
    cluster.live(3)
    cluster.exit(1, e.ExitCause.PREEMPTED)
    no_room(cluster, 2)
    cluster.live(70)
    assert claimed(cluster).waited == pytest.approx(70, abs=1.0)
    cluster.exit(0, e.ExitCause.PREEMPTED)
    no_room(cluster, 3)
    cluster.live(1)
    assert claimed(cluster).waited < 2
    for worker_id in (2, 3):
        cluster.post(e.WorkerPlaced(worker_id, "h", 1))
    cluster.live(1)
    assert claimed(cluster).waited == 0


def train(cluster, step, count=1):
    """So many steps, of 1000."""
    for each in range(step, step + count):
        cluster.now += 0.5
        cluster.post(e.ProgressReported(0, (report(0.5, world=cluster.version, step=each),), 1000, 1))


def test_the_work_that_is_left_is_what_one_worker_would_need_and_no_pause_changes_it():
    cluster = alone(1, 4)
    cluster.live(3)
    assert claimed(cluster).left == -1, "nobody knows"
    train(cluster, 1, 10)
    cluster.post(e.Tick())
    assert claimed(cluster).left == pytest.approx(990 * 0.5 * 4**0.8, rel=0.1), "as such jobs are"
    four = tuple(Point(n, 0.9 * n, 0.8 * n, n, 0.9, 0.8, 1.0) for n in range(1, 5))
    cluster.post(e.ScalingLearnt(4, (Observation(4, 64, 0.5, 50, 0.1),), Curve(four)))
    cluster.post(e.Tick())
    assert claimed(cluster).left == pytest.approx(990 * 0.5 * 3.6)
    cluster.now += 30.0
    cluster.post(e.Tick())
    assert claimed(cluster).left == pytest.approx(990 * 0.5 * 3.6), "in an evaluation, or a slow step"
    cluster.exit(3, e.ExitCause.PREEMPTED)
    no_room(cluster, 4)
    cluster.live(3)
    train(cluster, 11)
    cluster.post(e.Tick())
    assert len(cluster.worlds[cluster.version].members) == 3
    assert claimed(cluster).left == pytest.approx(990 * 0.5 * 3.6), "until the new number was measured"


# ---- what it does then ----


def others_claim(cluster, **fields):
    """What a neighbour claims, as long as it takes to be believed."""
    given = {"held": 5, "waiting": 0, "minimum": 1, "wanted": 8, "left": 1.0, "gains": (1.0,) * 8, **fields}
    for _ in range(2):
        cluster.post(e.NeighboursSeen((Claim("b", **given),)))
        cluster.live(1)


def test_as_long_as_another_needs_the_places_it_holds_it_gives_them_back():
    cluster = sharing(4, 8)
    cluster.post(e.WorkersFound(()))
    cluster.post(e.Tick())
    no_room(cluster, *range(1, 4))
    cluster.live(3)
    others_claim(cluster, held=3, minimum=4)
    cluster.live(3)
    assert not cluster.workers
    why = "0 of 4 places that the jobs of its queue have, less than its fewest, which are 4: others have theirs first"
    assert cluster.job.view().decision == why
    assert {worker.state for worker in cluster.job.view().workers} == {"draining"}
    others_claim(cluster, held=4, minimum=4)
    assert len(cluster.workers) == 4, "it asks again"
    told = [it.fields for it in cluster.story if isinstance(it, i.Record) and it.event == "decision"]
    assert [each["workers"] for each in told] == [0, 4], (
        "each change of its share stands in the journal, and nothing else"
    )
    assert told[0]["reason"] == why


def test_one_of_those_that_have_trained_keeps_the_state():
    cluster = sharing(3, 3)
    cluster.live(3)
    cluster.exit(2, e.ExitCause.PREEMPTED)
    no_room(cluster, 3)
    others_claim(cluster, held=2, minimum=4)
    cluster.live(3)
    assert [worker.has_state for worker in cluster.workers.values()] == [True]
    others_claim(cluster, held=4, minimum=4)
    cluster.live(3)
    assert len(cluster.worlds[cluster.version].members) == 3
    assert not [it for it in cluster.story if isinstance(it, i.Record) and it.event == "warning"]


# ---- before it has seen the others ----


def launched(cluster):
    return [it.worker_id for it in cluster.story if isinstance(it, i.LaunchWorker)]


def killed(cluster):
    return [it.worker_id for it in cluster.story if isinstance(it, i.KillWorker)]


CROWDED = Claim("b", held=7, waiting=1, minimum=1, wanted=8, left=1000.0, gains=(1.0,) + (0.8,) * 7)


def test_it_begins_with_its_fewest_and_asks_for_more_when_it_has_seen_the_others():
    """Else it launches all, the others see places that do not exist, and at the first look most are killed again."""
    cluster = sharing(1, 8)
    cluster.live(2)
    assert launched(cluster) == [0]
    assert cluster.job.view().decision == UNSEEN
    for _ in range(3):
        cluster.post(e.NeighboursSeen((CROWDED,)))
        cluster.live(2)
    assert (launched(cluster), killed(cluster)) == ([0], [])
    for _ in range(20):
        cluster.post(e.NeighboursSeen(()))
        cluster.live(2)
    assert len(launched(cluster)) == 8


def test_a_master_that_is_started_again_keeps_those_that_are_there_until_it_has_seen_the_others():
    cluster = alone(1, 4)
    cluster.live(3)
    cluster.limits = WorkerRange(minimum=1, maximum=8)
    cluster.post(e.ScaleRequested(cluster.limits))
    cluster.restart()
    cluster.live(4)
    assert sorted(cluster.workers) == launched(cluster) == [0, 1, 2, 3]
    assert cluster.job.view().decision == UNSEEN
    for _ in range(20):
        cluster.post(e.NeighboursSeen(()))
        cluster.live(2)
    assert (len(launched(cluster)), killed(cluster)) == (8, [])


def test_claims_that_can_not_be_read_hold_up_nobody_for_long():
    cluster = sharing(1, 4)
    cluster.live(UNSEEN_SECONDS - 1)
    assert len(launched(cluster)) == 1
    cluster.live(3)
    assert len(launched(cluster)) == 4
    cluster.restart()
    cluster.live(1)
    cluster.exit(3, e.ExitCause.PREEMPTED)
    cluster.live(UNSEEN_SECONDS - 4)
    assert len(launched(cluster)) == 4
    cluster.live(6)
    assert len(launched(cluster)) == 5
