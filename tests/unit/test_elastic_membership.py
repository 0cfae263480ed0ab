"""Worlds as a member sees them, and the measuring of pauses."""

import pytest

from elasticdl.common.environment import refuse_variables
from elasticdl.common.errors import UserError
from elasticdl.elastic.core.reporting import PauseClock
from elasticdl.elastic.core.world import Member, World, horovod_host
from elasticdl.elastic.link.session import rank_entry


def world(hosts, rank=0, **kwargs):
    return World.of(version=1, members=standing(hosts), rank=rank, **kwargs)


def standing(hosts):
    return [Member(worker_id=10 + i, host=host, step=5, has_state=True) for i, host in enumerate(hosts)]


def test_each_worker_is_a_host_of_its_own_to_horovod():
    names = [horovod_host(world(["a", "a", "b"], rank)) for rank in range(3)]
    assert names == ["a-10", "a-11", "b-12"]
    assert rank_entry(world(["a", "a", "b"], 2)) == {("rank_and_size", "b-12:0"): b"2,3,0,1,0,1"}


def test_a_world_needs_no_sync_when_all_stand_after_the_same_step():
    assert not world(["a", "a"]).needs_sync
    newcomer = Member(3, "a", 0, has_state=False)
    behind = Member(3, "a", 4, has_state=True)
    elsewhere = Member(3, "a", 5, has_state=True, synced_in=1)  # its world has made another step of this number
    for member in (newcomer, behind, elsewhere):
        assert World.of(2, (*standing(["a"]), member), 0).needs_sync
    assert World.of(2, (newcomer,), 0).is_first
    assert not world(["a"]).is_first


@pytest.mark.parametrize("name", ["HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE"])
def test_variables_that_break_a_second_init_are_refused(name):
    with pytest.raises(UserError, match=f"^{name} is set in the environment: .*; unset {name}$"):
        refuse_variables({name: "1"})
    refuse_variables({"HOROVOD_LOG_LEVEL": "debug"})


class TestPauseClock:
    def steps(self, clock, times):
        return [clock.step_done(t, world_version=1, grew=False) for t in times]

    def through(self, clock, start):
        clock.mark("stopped", start + 0.01)
        clock.mark("joined", start + 0.03)
        clock.mark("started", start + 0.06)
        clock.mark("synced", start + 0.10)

    def test_the_split_adds_up_to_the_pause(self):
        clock = PauseClock()
        assert self.steps(clock, [1.0, 1.02, 1.04]) == [None] * 3
        clock.left(1.05, broken=True, torn=True)
        self.through(clock, 1.05)
        pause = clock.step_done(1.18, world_version=2, grew=False)
        assert pause.kind == "failure"
        assert pause.steps_torn == 1
        assert pause.total == pytest.approx(1.18 - 1.04 - 0.02)
        assert [round(value, 3) for value in (pause.notice, pause.drain, pause.rendezvous)] == [0.01, 0.01, 0.02]

    def test_steps_that_are_shorter_with_more_workers_make_no_pause_negative(self):
        clock = PauseClock()
        self.steps(clock, [1.0, 3.0, 5.0])
        clock.left(5.0, broken=False, torn=False)
        self.through(clock, 5.0)
        pause = clock.step_done(6.1, world_version=2, grew=True)
        assert pause.first_step == 0
        assert pause.total == pytest.approx(0.1)

    def test_a_second_failure_on_the_way_belongs_to_the_same_pause(self):
        clock = PauseClock()
        self.steps(clock, [1.0, 1.1])
        clock.left(1.1, broken=False, torn=False)
        clock.mark("stopped", 1.11)
        clock.mark("joined", 1.12)
        clock.left(1.5, broken=True, torn=True)
        self.through(clock, 1.5)
        pause = clock.step_done(1.7, world_version=3, grew=False)
        assert pause.kind == "failure"
        assert pause.total == pytest.approx(0.6 - 0.1)

    def test_a_newcomer_has_no_pause_and_an_evaluation_is_none(self):
        clock = PauseClock()
        self.through(clock, 0.0)
        assert clock.step_done(0.5, world_version=1, grew=True) is None
        clock.step_done(0.6, world_version=1, grew=True)
        clock.resume(9.0)
        clock.left(9.0, broken=False, torn=False)
        self.through(clock, 9.0)
        pause = clock.step_done(9.2, world_version=2, grew=True)
        assert pause.kind == "grow"
        assert pause.total == pytest.approx(0.1)

    def test_an_evaluation_right_after_a_change_is_not_in_its_pause(self):
        clock = PauseClock()
        self.steps(clock, [1.0, 1.1])
        clock.left(1.1, broken=False, torn=False)
        self.through(clock, 1.1)
        clock.resume(5.0)
        assert clock.step_done(5.15, world_version=2, grew=False).total == pytest.approx(0.15)
