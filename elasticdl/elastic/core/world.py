"""A world as one of its members sees it."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.job.shared_values import Member as Member


@dataclass(frozen=True, slots=True)
class World:
    """An ordered list of workers with a version, and this worker's place in it."""

    version: int
    members: tuple[Member, ...]
    rank: int
    reason: str = ""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def is_first(self) -> bool:
        """Whether nobody holds any training state yet."""
        return not any(member.has_state for member in self.members)

    @property
    def needs_sync(self) -> bool:
        """Whether members differ. After a planned shrink all stand at the same place, and nothing need be sent."""
        return any(not self.stands_with_root(rank) for rank in range(self.size))

    def stands_with_root(self, rank: int) -> bool:
        """Whether a member holds the same state as rank 0. Two worlds may each have made a step of the same number."""
        root, member = self.members[0], self.members[rank]
        place = (member.step, member.epoch, member.synced_in)
        return member.has_state and place == (root.step, root.epoch, root.synced_in)


def horovod_host(world: World) -> str:
    """The name of the host that Horovod is told this worker runs on: one of its own.

    A worker sees one device, so its local rank is 0. And a host of its own saves Horovod two of the three full meshes
    that it builds on each init (all workers, those of one host, those with one local rank on all hosts).
    """
    member = world.members[world.rank]
    return f"{member.host}-{member.worker_id}"


ALONE = World(version=0, members=(Member(worker_id=0, host="localhost", step=0, has_state=False),), rank=0)
