"""A world as one of its members sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from elasticdl.job.messages import Member as Member
from elasticdl.job.messages import standing


@dataclass(frozen=True, slots=True)
class World:
    """So many workers, numbered by rank, and this worker's place among them. It knows rank 0 and itself, not the others."""

    version: int
    size: int
    rank: int
    standing: int  # the first so many ranks hold the same state as rank 0; 0: nobody holds any
    root: Member
    own: Member
    reason: str = ""

    @classmethod
    def of(cls, version: int, members: Sequence[Member], rank: int, reason: str = "") -> Self:
        """As the member of this rank sees it. ``members``: in rank order."""
        return cls(version, len(members), rank, standing(members), members[0], members[rank], reason)

    @property
    def is_first(self) -> bool:
        """Whether nobody holds any training state yet."""
        return self.standing == 0

    @property
    def needs_sync(self) -> bool:
        """Whether members differ. After a planned shrink all stand at the same place, and nothing need be sent."""
        return self.standing < self.size

    def stands_with_root(self, rank: int) -> bool:
        """Whether a member holds the same state as rank 0."""
        return rank < self.standing


def horovod_host(world: World) -> str:
    """The name of the host that Horovod is told this worker runs on: one of its own.

    A worker sees one device, so its local rank is 0. And a host of its own saves Horovod two of the three full meshes
    that it builds on each init (all workers, those of one host, those with one local rank on all hosts).
    """
    return f"{world.own.host}-{world.own.worker_id}"


ALONE = World.of(version=0, members=(Member(worker_id=0, host="localhost", step=0, has_state=False),), rank=0)
