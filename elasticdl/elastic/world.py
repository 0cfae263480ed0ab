"""A world as one of its members sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a world; its place in the list is its rank."""

    worker_id: int
    host: str
    step: int
    has_state: bool


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
        """Whether members differ. After a planned shrink all stand after the same step, and nothing need be sent."""
        root = self.members[0]
        return any(not member.has_state or member.step != root.step for member in self.members)

    @property
    def local_rank(self) -> int:
        host = self.members[self.rank].host
        return sum(member.host == host for member in self.members[: self.rank])

    @property
    def local_size(self) -> int:
        host = self.members[self.rank].host
        return sum(member.host == host for member in self.members)

    @property
    def cross_rank(self) -> int:
        """This worker's place among those with the same local rank on other hosts, hosts in order of appearance."""
        return self._peers_across().index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self._peers_across())

    def _peers_across(self) -> list[int]:
        seen: dict[str, int] = {}
        peers = []
        mine = self.local_rank
        for rank, member in enumerate(self.members):
            if seen.get(member.host, 0) == mine:
                peers.append(rank)
            seen[member.host] = seen.get(member.host, 0) + 1
        return peers


ALONE = World(version=0, members=(Member(worker_id=0, host="localhost", step=0, has_state=False),), rank=0)
