"""A worker that the kernel has killed for want of memory is told from one that somebody has killed."""

import pytest

from elasticdl.places.worker_process import MemoryKills

EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "groups",
    [
        "0::/\n",
        "0::/kubepods/pod1/abc\n",  # a container whose group is what is mounted
    ],
)
def test_a_kill_that_the_kernel_counts_is_told_once(tmp_path, groups):
    write(tmp_path / "proc/self/cgroup", groups)
    events = tmp_path / "sys/fs/cgroup/memory.events"
    write(events, EVENTS.format(3))
    kills = MemoryKills(tmp_path)
    assert not kills.happened(), "those of before are nobody's"
    write(events, EVENTS.format(4))
    assert kills.happened()
    assert not kills.happened()


@pytest.mark.parametrize("groups", ["", "0::/\n", "4:memory:/old\n", "0::/gone\n"])
def test_where_the_kernel_does_not_say_nothing_is_said(groups, tmp_path):
    assert not MemoryKills(tmp_path).happened()
    write(tmp_path / "proc/self/cgroup", groups)
    assert not MemoryKills(tmp_path).happened()
