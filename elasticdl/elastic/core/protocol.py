"""The words of the worker's core: what can happen to a worker, and what it wants done.

`elasticdl.elastic.core.worker.WorkerCore.step` takes an event and returns instructions. Shells make the events and
carry the instructions out: the session, the store, the collective, the training thread, signals and timers.
Events are what may change the membership. What happens in each step is none (`StepCore`).

Beside events and instructions: the world as one of its members sees it, and what the training loop raises to change its course.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Self

from elasticdl.common.errors import ElasticDLError
from elasticdl.job.messages import Failed, Finished, KvPut, Message, Notice, Order, standing
from elasticdl.job.messages import Member as Member

# A world as one of its members sees it.


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


ALONE = World.of(version=0, members=(Member(worker_id=0, host="localhost", step=0, has_state=False),), rank=0)


class Event:
    """Something has happened."""

    __slots__ = ()


class Instruction:
    """Something is to be done."""

    __slots__ = ()


class Trigger(Event, StrEnum):
    """What may happen to a worker, in the words of the table in `elasticdl.elastic.core.worker`."""

    # Events of which there is no more to say.
    READY = "it is warm"
    CONNECTED = "the collective is connected"
    SYNCED = "it stands where rank 0 stands"
    RETURNED = "the training function returns"
    ALL_RETURNED = "all have voted that theirs has returned"
    CLOSED = "the collective is closed"
    # The same, and they cause no transition.
    TICK = "time has passed"
    # What `WorkerCore` derives from those and from the events below.
    WORLD = "a world is published"
    TOLD = "it is told to leave for good, or has lost its master"
    LEFT = "all members leave together"
    FAILURE = "a collective fails"
    LAST_WORD = "it says that it has finished or failed"


class Command(Instruction, StrEnum):
    """What is to be done, where there is no more to say."""

    DUMP_STACKS = "print the stacks of all threads"  # to the session
    # To the training thread, about the core's present world.
    CONNECT = "enter this world"  # answered by `CONNECTED` or `CollectiveFailed`
    SYNCHRONIZE = "bring all members to rank 0's state"  # answered by `SYNCED` or `CollectiveFailed`
    TRAIN = "call the training function"
    CAST_END_VOTE = "take part in a step with nothing to add"  # answered by `ALL_RETURNED` or `CollectiveFailed`
    COMPLETE = "all members' training functions have returned"


class SaveScope(Enum):
    """What is saved of a training state; see `elasticdl.elastic.core.training_step`."""

    WITH_PARAMETERS = "what moves with the parameters: buffers, the learning rate's rule"
    AT_COMMIT = "the user's values and the optimizer's settings"


# ---- events: the session ----


@dataclass(frozen=True, slots=True)
class SessionOpened(Event):
    """A stream to a master is open. ``unsent``: what no master is known to have saved."""

    unsent: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Welcomed(Event):
    """The master's first word. ``generation`` grows with each start of a master of the job; 0 if it has none."""

    heartbeat_interval: float
    generation: int = 0


@dataclass(frozen=True, slots=True)
class WorldPublished(Event):
    world: World


@dataclass(frozen=True, slots=True)
class Ordered(Event):
    """The master has said this."""

    order: Order


@dataclass(frozen=True, slots=True)
class MasterLost(Event):
    """There is no master to be had, and the session has given up."""

    reason: str


# ---- events: the process ----


@dataclass(frozen=True, slots=True)
class Terminated(Event):
    """Somebody else than the master told the process to leave (SIGTERM)."""

    reason: str


# ---- events: training ----


@dataclass(frozen=True, slots=True)
class CollectiveFailed(Event):
    reason: str


@dataclass(frozen=True, slots=True)
class WorldLeft(Event):
    """All members leave the present world together: after a vote, or since a hook or the script wants it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Said(Event):
    """The script, or a shell, has something for the master. `Finished` and `Failed` are last words."""

    message: Notice | KvPut | Finished | Failed


# ---- instructions: to the session ----


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Over the stream, if there is one. A `Notice` is kept for the next if this one breaks."""

    message: Message


@dataclass(frozen=True, slots=True)
class RefuseMaster(Instruction):
    """End this stream and look for the master again: a later one of the same job was heard already."""

    reason: str


# ---- instructions: to the collective, from whatever thread ----


@dataclass(frozen=True, slots=True)
class BreakCollective(Instruction):
    """Make whoever waits in this world fail at once, here and on the other members."""

    world_version: int
    reason: str
    entered: bool  # the worker is in that world


# ---- instructions: to the training thread ----


@dataclass(frozen=True, slots=True)
class LeaveWorld(Instruction):
    """Drop a torn step if the world is ``broken``, and close the collective; answered by `CLOSED`."""

    reason: str
    broken: bool


@dataclass(frozen=True, slots=True)
class LeaveJob(Instruction):
    """This worker is to leave for good. ``drained``: training goes on without it."""

    reason: str
    checkpoint: bool
    drained: bool


@dataclass(frozen=True, slots=True)
class Fail(Instruction):
    """Raise this error."""

    error: type[Exception]
    message: str


# What the elastic loop raises to change its course.
#
# ElasticDLError
# +-- WorldBroken    a collective failed: restore, join the next world, sync, go on
# +-- WorldChanged   all members agreed to leave after this step: join the next world, sync, go on
# +-- StageSuperseded      the others have ended this training already: leave it, and go on in the script
# +-- Stopped        this worker is to leave for good: clean up and end the process


class WorldBroken(ElasticDLError):
    """A collective of this world failed; parameters are as before or as after the step, never in between."""


class WorldChanged(ElasticDLError):
    """The vote of the last step says that everybody leaves this world now."""


class StageSuperseded(ElasticDLError):
    """This worker is in a training that the others have ended; there is a later one to take part in."""


class Stopped(ElasticDLError):
    """This worker was told to leave: the job stops, or it alone is drained and training goes on without it."""

    def __init__(self, reason: str, *, checkpoint: bool, drained: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.checkpoint = checkpoint
        self.drained = drained
