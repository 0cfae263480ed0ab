"""A worker that the kernel has killed for want of memory is told from one that somebody has killed."""

import pytest

from elasticdl.master.state.events import ExitCause
from elasticdl.places.memory_kills import MemoryKills

KILLED = (-9, ExitCause.KILLED, "SIGKILL")
SHORT = (ExitCause.OUT_OF_MEMORY, "the kernel has killed it, as memory was short")


@pytest.fixture
def group(tmp_path):
    """``group(n)``: so many processes of it were killed."""
    (tmp_path / "cgroup").write_text("4:memory:/old\n0::/user.slice/job\n")
    folder = tmp_path / "user.slice/job"
    folder.mkdir(parents=True)

    def count(kills):
        (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 1\noom_kill {kills}\noom_group_kill 0\n")

    return count


def test_a_kill_that_the_kernel_counts_is_told_once(group, tmp_path):
    group(3)
    kills = MemoryKills(tmp_path / "cgroup", tmp_path)
    assert kills.explain(*KILLED) == KILLED[1:], "those of before are nobody's"
    group(4)
    assert kills.explain(*KILLED) == SHORT
    assert kills.explain(*KILLED) == KILLED[1:]


def test_an_end_of_another_kind_is_what_it_is_and_takes_the_kill_along(group, tmp_path):
    group(0)
    kills = MemoryKills(tmp_path / "cgroup", tmp_path)
    group(1)
    raised = (1, ExitCause.CRASHED, "DataLoader worker is killed by signal: Killed")
    assert kills.explain(*raised) == raised[1:]
    assert kills.explain(*KILLED) == KILLED[1:]


@pytest.mark.parametrize("own_group", ["", "0::/\n", "4:memory:/old\n", "0::/gone\n"])
def test_where_the_kernel_does_not_say_nothing_is_said(own_group, tmp_path):
    (tmp_path / "cgroup").write_text(own_group)
    assert MemoryKills(tmp_path / "cgroup", tmp_path).explain(*KILLED) == KILLED[1:]
    assert MemoryKills(tmp_path / "none", tmp_path).explain(*KILLED) == KILLED[1:]
