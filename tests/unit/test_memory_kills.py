"""A worker that the kernel has killed for want of memory is told from one that somebody has killed."""

import pytest

from elasticdl.places.worker_process import MemoryKills

TWO = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"
ONE = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/\n", "memory.events", TWO),
        ("0::/kubepods/pod1/abc\n", "memory.events", TWO),  # a container whose group is what is mounted
        ("9:cpu,memory:/job_7\n0::/\n", "memory/job_7/memory.oom_control", ONE),
        ("9:memory:/docker/abc\n", "memory/memory.oom_control", ONE),
    ],
)
def test_a_kill_that_the_kernel_counts_is_told_once(tmp_path, groups, file, text):
    write(tmp_path / "proc/self/cgroup", groups)
    events = tmp_path / "sys/fs/cgroup" / file
    write(events, text.format(3))
    kills = MemoryKills(tmp_path)
    assert not kills.happened(), "those of before are nobody's"
    write(events, text.format(4))
    assert kills.happened()
    assert not kills.happened()


@pytest.mark.parametrize("groups", ["", "0::/\n", "4:memory:/old\n", "0::/gone\n"])
def test_where_the_kernel_does_not_say_nothing_is_said(groups, tmp_path):
    assert not MemoryKills(tmp_path).happened()
    write(tmp_path / "proc/self/cgroup", groups)
    assert not MemoryKills(tmp_path).happened()
