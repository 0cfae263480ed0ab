"""Workers as the rendezvous sees them: where each stands, and what it was told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Standing(Enum):
    COMING = "starting"  # has a session and is in no world; getting ready to ask
    STANDBY = "standby"  # has asked, and is in no world
    MEMBER = "member"
    LEFT = "between worlds"  # was a member of the present world, and has asked for the next
    LEAVING = "draining"  # finishes its step and goes; will not be in the next world
    FINISHED = "finished"  # its training is complete


class Told(IntEnum):
    NOTHING = 0
    CHANGE = 1
    BROKEN = 2


@dataclass(slots=True)
class Peer:
    """A worker that has, or lately had, a session."""

    worker_id: int
    host: str
    arrival: int
    standing: Standing = Standing.COMING
    connected: bool = True
    step: int = 0
    epoch: int = 0
    has_state: bool = False
    world_version: int = 0  # of the last world it was a member of
    rank: int = -1  # in that world
    told: Told = Told.NOTHING
    lingers: bool = False  # leaves as soon as another member has its state

    @property
    def was_member_and_leaves(self) -> bool:
        """It holds the state until its process has ended."""
        return self.standing is Standing.LEAVING and self.world_version > 0

    def precedence(self) -> tuple[bool, int, int, bool, int, int]:
        """Sorts into rank order (rule 5 of the rendezvous)."""
        step, epoch = (self.step, self.epoch) if self.has_state else (0, 0)
        return (not self.has_state, -step, -epoch, self.rank < 0, self.rank, self.arrival)
