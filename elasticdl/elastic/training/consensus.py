"""Small agreements: what all members of a world must know alike, such as whether training stops.

Each is one small collective. All members call it at the same point of training, which follows from the state that they share.
If a member is lost meanwhile, `WorldBroken` is raised: some members may have heard the answer, others not, so nobody acts by it.
All ask again at the same point in the next world.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.training import plain_data


def from_root(collective: Collective, value: Any, name: str) -> Any:
    """Rank 0's value, which is plain data (`plain_data`), on all members; what the others pass is not looked at.

    Raises:
        WorldBroken: a member was lost.
    """
    world = collective.world
    if world.size == 1:
        return value
    sent = plain_data.dumps(value) if world.rank == 0 else b""
    return plain_data.loads(collective.broadcast_bytes(sent, name))


def of_all(collective: Collective, number: float, name: str) -> list[float]:
    """The numbers of all members, by rank.

    Raises:
        WorldBroken: a member was lost.
    """
    world = collective.world
    mine = np.zeros(world.size)
    mine[world.rank] = number
    numbers: list[float] = np.asarray(collective.sum(mine, name)).tolist()
    return numbers
