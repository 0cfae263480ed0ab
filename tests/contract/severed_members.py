"""In namespaces of its own: a world of which one member is cut off from another, in every phase. `FOLDER ENGINE...`"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.processes import Processes
from benchmarks.storm.surroundings import Network
from elasticdl.elastic.core.protocol import WorldBroken
from tests.contract.collective_members import DEADLINE, Group, MemberProcess

LARGE = 4 << 20  # elements: more than all buffers on the way take
# A connection that leads nowhere is not noticed by itself: what ends the waiting is that the world is broken.
UNNOTICED_SECONDS = 0.5

Cut = Callable[[], None]
BROKEN, ANY = WorldBroken, object  # what must come of it


def reducing(group: Group, members: list[MemberProcess], cut: Cut) -> type:
    group.form(members)
    for member in members:
        member.tell("sum_for_ever", LARGE)
    time.sleep(UNNOTICED_SECONDS)
    cut()
    return BROKEN


def idle(group: Group, members: list[MemberProcess], cut: Cut) -> type:
    group.form(members)
    cut()
    for member in members:
        member.tell("sum", np.ones(LARGE, np.float32))
    return BROKEN


def connecting(group: Group, members: list[MemberProcess], cut: Cut) -> type:
    cut()
    group.begin(members)
    return ANY  # the third member may be connected with both


def closing(group: Group, members: list[MemberProcess], cut: Cut) -> type:
    group.form(members)
    cut()
    for member in members:
        member.tell("stop")
    return type(None)


def survive(network: Network, group: Group, members: list[MemberProcess], lose: Callable[..., type]) -> None:
    one, two, _ = network.hosts
    expected = lose(group, members, lambda: network.cut(one, two))
    time.sleep(UNNOTICED_SECONDS)
    began = time.monotonic()
    group.break_world(members)
    results = [member.result() for member in members]
    seconds = time.monotonic() - began
    assert all(isinstance(result, expected) for result in results), results
    assert seconds < DEADLINE / 4, seconds
    group.all(members, "stop")
    survivors = [members[0], members[2]]
    group.form(survivors)
    totals = group.all(survivors, "sum", [np.ones(5, np.float32)] * 2)
    assert all((total == 2).all() for total in totals)
    group.all(survivors, "stop")
    network.heal(one, two)
    print(f"{lose.__name__}: all left within {1e3 * seconds:.0f} ms", flush=True)


def main() -> None:
    with Processes(Path(sys.argv[1])) as holders:
        network = Network(3, holders)
        for engine in sys.argv[2:]:
            group = Group(engine)
            try:
                members = [member for host in network.hosts for member in group.add(host=host.pid)]
                for lose in (reducing, idle, connecting, closing):
                    survive(network, group, members, lose)
            finally:
                group.close()
            print(f"{engine}: all holds")


if __name__ == "__main__":
    main()
