"""What workers and their master say to each other. On the wire these are the messages of `proto/elasticdl.proto` with the same names
and fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

# What the messages between master and worker are made of, and what both cores keep in this form.

# Scope and key of the entry that rank 0 makes in the store of each world: what its data and its model are. It may have so many bytes.
FACTS = ("job", "facts")
MOST_FACTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a world, where it stood when it asked for it; its place in the world's list is its rank."""

    worker_id: int
    host: str
    step: int
    has_state: bool
    epoch: int = 0
    synced_in: int = 0  # version of the world in which it last stood where rank 0 stood

    def stands_with(self, root: Member) -> bool:
        """Whether both hold the same state. Two worlds may each have made a step of the same number."""
        place = (self.step, self.epoch, self.synced_in)
        return self.has_state and root.has_state and place == (root.step, root.epoch, root.synced_in)


def standing(members: Sequence[Member]) -> int:
    """Of ``members`` in rank order, how many stand with rank 0; they come first. 0: nobody holds any state."""
    return sum(1 for _ in takewhile(lambda member: member.stands_with(members[0]), members))


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step on one global batch. ``loss`` is the mean over it; ``seconds`` since the step before."""

    step: int
    epoch: int
    loss: float
    samples: int
    learning_rate: float
    seconds: float
    world_version: int
    total_samples: int  # since the first step of the model
    ends_epoch: bool
    compared: int = 0  # workers whose states were compared before this step, and were one; 0 if that was not done


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one worker's steps went into, seconds a step: medians over its last steps in the present world."""

    steps: int  # of which these are the medians
    data: float
    compute: float
    wait: float  # for the others and for the sum itself
    update: float  # the optimizer, and the script between two steps
    samples: float  # of this worker, a step

    @property
    def busy(self) -> float:
        return self.data + self.compute + self.update


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds a step over the members of a world; all zero while nothing is known."""

    busy: float = 0.0  # mean over the members
    waited: float = 0.0  # likewise
    least_waited: float = 0.0  # by the member for which the others wait: what the sum itself takes at most


# Characters. What the master keeps of a job has to fit into one object of a cluster, and each worker may fail.
MOST_OF_MESSAGE = 500
MOST_OF_TRACEBACK = 20_000


# ---- what a worker says ----


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each session. After it a worker repeats what is still true: that it asks for a world, leaves, or has
    finished. ``world_version``: of the world that the worker believes to be in; 0 for none.
    """

    host: str = ""  # this and the process id are known to the worker's end of the connection
    pid: int = 0
    world_version: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    world_version: int
    step: int
    progress: int  # grows with everything that the worker does
    waiting: bool  # in a collective
    times: StepTimes | None = None
    ending: bool = False  # its training function has returned


@dataclass(frozen=True, slots=True)
class Ask:
    """The worker is in no world (any more) and ready for the next."""

    left_world: int
    step: int
    has_state: bool
    broken: bool = False
    reason: str = ""
    epoch: int = 0  # that it stands in
    synced_in: int = 0  # version of the world in which it last stood where rank 0 stood


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker leaves: it got SIGTERM, or was told to.

    ``lingers``: perhaps it alone holds the state, and it trains on until the master says that another has it which stays, or its
    time is over. Then it says so again without ``lingers``.
    """

    reason: str
    lingers: bool = False


@dataclass(frozen=True, slots=True)
class KvPut:
    """An entry of the store by which the members of a world find each other."""

    world_version: int
    scope: str
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """What rank 0 reports of the steps since its last report."""

    steps: tuple[StepReport, ...]
    total_steps: int
    total_epochs: int


@dataclass(frozen=True, slots=True)
class Notice:
    """For the job's journal: ``event`` and its fields as in `elasticdl.job.journal`."""

    event: str
    fields: Mapping[str, Any]
    number: int = 0  # the worker repeats it under this number until a master has saved it; 0: never


@dataclass(frozen=True, slots=True)
class Finished:
    """Training is complete. ``together``: on all members of the worker's world."""

    step: int
    epochs: int
    metrics: Mapping[str, float]
    together: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker can't go on. ``users``: the user's code raised, and no other worker would do better. ``trained``: this worker
    has made a step of the job; the worker's core fills it in."""

    users: bool
    message: str
    traceback: str = ""
    trained: bool = False


Message = Hello | Heartbeat | Ask | Draining | KvPut | Progress | Notice | Finished | Failed


# ---- what a master says, besides the world that it has formed ----


@dataclass(frozen=True, slots=True)
class Change:
    """Finish your step, leave together, ask for the next world."""

    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A member is gone: leave at once."""

    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Leave after your step."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopWork:
    """The job ends. ``checkpoint``: whether those who leave write one."""

    reason: str
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Say where you stand."""


Order = Change | Broken | Drain | StopWork | DumpStacks


def failed(message: str, traceback: str, *, users: bool) -> Failed:
    """Of the message the beginning of the first line is told, of the traceback the end."""
    line = message.strip().partition("\n")[0][:MOST_OF_MESSAGE] or "no reason was given"
    return Failed(users, line, traceback[-MOST_OF_TRACEBACK:])
