"""Worlds as a member sees them, and the measuring of pauses."""

import pytest

from elasticdl.elastic.collectives.horovod import horovod_host
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.reporting import PauseClock


def world(hosts, rank=0):
    return World.of(version=1, members=standing(hosts), rank=rank)


def standing(hosts):
    return [Member(worker_id=10 + i, host=host, step=5, has_state=True) for i, host in enumerate(hosts)]


def test_each_worker_is_a_host_of_its_own_to_horovod():
    names = [horovod_host(world(["a", "a", "b"], rank)) for rank in range(3)]
    assert names == ["a-10", "a-11", "b-12"]


def test_a_world_needs_no_sync_when_all_stand_after_the_same_step():
    assert not world(["a", "a"]).needs_sync
    newcomer = Member(3, "a", 0, has_state=False)
    behind = Member(3, "a", 4, has_state=True)
    elsewhere = Member(3, "a", 5, has_state=True, synced_in=1)  # its world has made another step of this number
    for member in (newcomer, behind, elsewhere):
        assert World.of(2, (*standing(["a"]), member), 0).needs_sync
    assert World.of(2, (newcomer,), 0).is_first
    assert not world(["a"]).is_first


def paused(steps, *left, after, grew=False, resumed_before=None, resumed=None):
    """``steps``: when they were done. ``left``: when the world was, and whether it broke. ``resumed``: after an evaluation."""
    clock = PauseClock()
    assert [clock.step_done(at, world_version=1, grew=False) for at in steps] == [None] * len(steps)
    if resumed_before:
        clock.resume(resumed_before)
    for start, broken in left:
        clock.left(start, broken=broken, torn=broken)
        for stage, seconds in {"stopped": 0.01, "joined": 0.03, "started": 0.06, "synced": 0.10}.items():
            clock.mark(stage, start + seconds)
    if resumed:
        clock.resume(resumed)
    return clock.step_done(after, world_version=2, grew=grew)


@pytest.mark.parametrize(
    ("steps", "left", "after", "more", "kind", "total"),
    [
        ([1.0, 1.02, 1.04], [(1.05, True)], 1.18, {}, "failure", 1.18 - 1.04 - 0.02),
        # Steps that are shorter with more workers make no pause negative.
        ([1.0, 3.0, 5.0], [(5.0, False)], 6.1, {"grew": True}, "grow", 0.1),
        # A second failure on the way belongs to the same pause.
        ([1.0, 1.1], [(1.1, False), (1.5, True)], 1.7, {}, "failure", 0.6 - 0.1),
        ([1.0, 1.1], [(1.1, False)], 5.15, {"resumed": 5.0}, "shrink", 0.15),
        ([0.5, 0.6], [(9.0, False)], 9.2, {"resumed_before": 9.0, "grew": True}, "grow", 0.1),
    ],
)
def test_a_pause_is_what_a_change_costs_beyond_a_step(steps, left, after, more, kind, total):
    pause = paused(steps, *left, after=after, **more)
    assert (pause.fields["kind"], pause.fields["total"]) == (kind, pytest.approx(total))
    assert pause.fields["first_step"] >= 0


def test_the_split_of_a_pause():
    pause = paused([1.0, 1.02, 1.04], (1.05, True), after=1.18)
    assert pause.fields["steps_torn"] == 1
    assert [round(pause.fields[part], 3) for part in ("notice", "drain", "rendezvous")] == [0.01, 0.01, 0.02]


def test_a_newcomer_has_no_pause():
    assert paused([], (0.0, False), after=0.5, grew=True) is None
