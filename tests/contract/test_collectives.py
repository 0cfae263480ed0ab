"""What every engine behind the port of collectives does, with real processes: sums, deaths, freezes, worlds by the hundred."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from elasticdl.elastic.core.protocol import WorldBroken
from tests.contract.collective_members import ENGINES, KERAS_ENGINES, Group, MemberProcess

LARGE = 4 << 20  # elements: more than all buffers on the way take


ALL_ENGINES = pytest.mark.parametrize("group", [*ENGINES, *KERAS_ENGINES], indirect=True)


@pytest.fixture(params=ENGINES)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = Group(request.param)
    yield group
    group.close()


def require_next_world(group: Group, members: list[MemberProcess]) -> None:
    """They leave the present one and train on in another."""
    group.all(members, "stop")
    group.form(members)
    ones = [np.ones(5, np.float32)] * len(members)
    assert all((total == len(members)).all() for total in group.all(members, "sum", ones))


def require_broken(results: list[object]) -> None:
    assert [type(result) for result in results] == [WorldBroken] * len(results), results


def test_sums_are_those_of_all_members_to_the_same_bits(group: Group) -> None:
    draw = np.random.default_rng(0)
    members = group.add(3)
    for size in (3, 2, 1):
        present = members[:size][::-1]  # ranks in another order than numbers
        group.form(present)
        for dtype in (np.float32, np.float64, np.float16, np.int32, np.int64):
            given = [(draw.random(1000) * 20).astype(dtype) for _ in present]
            found = group.all(present, "sum", given)
            np.testing.assert_allclose(found[0].astype(float), np.sum(given, axis=0, dtype=float), rtol=3e-3)
            assert all(other.tobytes() == found[0].tobytes() for other in found)
        for special in ("bfloat16", "complex64", "complex128"):
            totals = group.all(present, "sum_as", [special] * size, [[1.0, 2.0]] * size)
            assert totals == [[size, 2.0 * size]] * size
        assert group.all(present, "sum_each_second", [6] * size) == [[size, 1] * 3] * size, "a tensor with gaps"
        group.all(present, "stop")


@pytest.mark.parametrize("group", KERAS_ENGINES, indirect=True)
def test_tensors_of_tensorflow_are_summed_in_their_shapes(group: Group) -> None:
    members = group.add(2)
    group.form(members)
    shapes = [(3, 5), (), (1,), (0, 4), (1000, 100)]
    for dtype in (np.float32, np.float64):
        given = [[np.full(shape, rank + 1, dtype) for shape in shapes] for rank in range(2)]
        for found in group.all(members, "sum_tensors", given):
            assert [total.shape for total in found] == shapes
            assert all(total.dtype == dtype and (total == 3).all() for total in found)


@ALL_ENGINES
def test_bytes_of_all_lengths_go_from_rank_0_to_all_and_to_one_alone_and_from_all_to_rank_0(group: Group) -> None:
    members = group.add(3)
    group.form(members)
    given = [np.full(length, rank, np.uint8) for rank, length in enumerate((7, 0, 100_000))]
    first, *others = group.all(members, "gather", given)
    assert [part.tolist() for part in first] == [array.tolist() for array in given]
    assert others == [[], []]
    for length in (0, 10, (1 << 14) - 8, (1 << 14) - 7, 100_000):  # the first 16 KB hold the length, too
        data = bytes(index % 251 for index in range(length))
        assert group.all(members, "broadcast_bytes", [data, b"other", b""]) == [data] * 3
        sent = np.arange(length, dtype=np.uint32).view(np.uint8)
        root, other, receiver = group.all(members, "send_array", [sent, sent * 0, sent * 0], [2] * 3)
        assert receiver.tolist() == sent.tolist()
        assert len(root) == len(other) == 0
    group.all(members, "stop")
    group.form(members)
    group.all(members, "sum", [np.ones(3, np.float32)] * 3, ["gradients"] * 3)
    for told in group.all(members, "last_operations"):  # of an earlier world nothing counts
        assert told.begun == 1
        assert told.last[0].startswith("gradients")


@ALL_ENGINES
def test_unequal_parts_are_exchanged_between_all_members(group: Group) -> None:
    members = group.add(3)
    group.form(members)
    rows = [[0, 5, 1], [2, 0, 3000], [4, 0, 7]]  # from each rank to each
    received = [list(sizes) for sizes in zip(*rows, strict=True)]
    given = [np.repeat(np.arange(3) + 10 * rank, rows[rank]).astype(np.uint8) for rank in range(3)]
    expected = [np.repeat(10 * np.arange(3) + rank, received[rank]) for rank in range(3)]
    found = group.all(members, "exchange", given, rows, received)
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("work", ["sum_for_ever", "exchange_for_ever", "barrier", "start"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_leave_a_world_in_which_a_member_is_lost(group: Group, how: signal.Signals, work: str) -> None:
    """At work, while nothing is done, or while the world is being connected."""
    members = group.add(4)
    survivors, lost = [members[0], *members[2:]], members[1]
    if work == "start":
        group.all(members, "count")  # all are up
    else:
        group.form(members)
        group.all(members, "barrier")
    if work.endswith("for_ever"):
        for member in members:
            member.tell(work, LARGE)
        time.sleep(0.3)
    lost.signal(how)
    if work == "barrier":
        for member in survivors:
            member.tell(work)
    elif work == "start":
        group.begin(members)
    time.sleep(0.2)
    group.break_world(survivors)  # if one is killed its neighbours fail by themselves, the others do not
    require_broken([member.result() for member in survivors])
    require_next_world(group, survivors)


def test_who_leaves_and_a_late_break_of_the_world_before_are_no_harm(group: Group) -> None:
    members = group.add(3)
    group.form(members)
    group.all(members, "barrier")
    group.all(members[:1], "stop")
    members[0].signal(signal.SIGKILL)
    require_next_world(group, members[1:])
    for member in members[1:]:
        member.tell("break", group.version - 1)
    time.sleep(0.2)
    group.all(members[1:], "barrier")


@pytest.mark.parametrize("are_asked", [False, True])
def test_who_has_not_asked_tells_what_another_waits_for(group: Group, are_asked: bool) -> None:
    members = group.add(2)
    group.form(members)
    group.all(members, "barrier")
    if are_asked:
        assert group.all(members, "ask", [1.0, 2.0]) == [3.0, 3.0]
    members[0].tell("ask", 1.0)
    members[1].tell("sum", np.ones(1000, np.float32), "gradients")
    told = str(members[1].result())
    assert "worker 0 waits for all workers at elastic.mean(), and worker 1 has gone on to gradients: " in told
    group.break_world(members)
    require_broken([members[0].result()])
    group.all(members, "stop")
    group.form(members)
    assert group.all(members, "ask", [1.0, 2.0]) == [3.0, 3.0]


@pytest.mark.parametrize("group", ["torch"], indirect=True)  # only it has a limit of its own
def test_ranks_may_be_apart_for_longer_than_connecting_may_take(group: Group) -> None:
    members = group.add(2)
    group.all(members, "shorten_timeouts", [1.0, 1.0])
    group.form(members)
    members[0].tell("barrier")
    time.sleep(1.5)
    members[1].tell("barrier")
    assert [member.result() for member in members] == [None, None]


def test_worlds_leave_nothing_behind(group: Group) -> None:
    members = group.add(2)
    ones = [np.ones(1000, np.float32)] * 2
    counts = []
    for number in range(200):
        group.form(members)
        group.all(members, "sum", ones)
        group.all(members, "stop")
        if number in (19, 199):
            time.sleep(0.5)
            counts.append(group.all(members, "count"))
    for (threads, files, memory), (threads_later, files_later, memory_later) in zip(*counts, strict=True):
        assert threads_later <= threads + 1
        assert files_later <= files + 2
        assert memory_later < memory + 8192
