"""How often the kernel has killed for the limit of memory, as control groups of both versions tell it."""

import pytest

from elasticdl.places.memory_limit import kills

TWO = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n"
ONE = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("groups", "file", "text", "killed"),
    [
        ("0::/\n", "memory.events", TWO, 2),
        ("0::/slurm/job_7\n", "slurm/job_7/memory.events", TWO, 2),
        ("0::/kubepods/pod1/abc\n", "memory.events", TWO, 2),  # a container whose group is what is mounted
        ("9:cpu,memory:/job_7\n0::/\n", "memory/job_7/memory.oom_control", ONE, 3),
        ("9:memory:/docker/abc\n", "memory/memory.oom_control", ONE, 3),
        ("0::/\n", "memory.events", "low 0\n", 0),
        ("0::/\n", "elsewhere", "", 0),
    ],
)
def test_kills_are_read_where_the_group_of_this_process_has_them(tmp_path, groups, file, text, killed):
    cgroup, events = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup" / file
    for path, content in ((cgroup, groups), (events, text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert kills(tmp_path) == killed


def test_without_control_groups_there_are_none(tmp_path):
    assert kills(tmp_path) == 0
