"""The words of the worker's core: what can happen to a worker, and what it wants done.

`elasticdl.elastic.core.worker.WorkerCore.step` takes an event and returns instructions. Shells make the events and
carry the instructions out: the session, the store, the collective, the framework's training state, signals and timers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from elasticdl.elastic.core.messages import Failed, Finished, Message, Notice, StoreEntry
from elasticdl.elastic.core.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World


class Event:
    """Something has happened."""

    __slots__ = ()


class Instruction:
    """Something is to be done."""

    __slots__ = ()


class Trigger(Event, StrEnum):
    """What may happen to a worker, in the words of the table in `elasticdl.elastic.core.lifecycle`."""

    # Events of which there is no more to say.
    READY = "it is warm"
    CONNECTED = "the collective is connected"
    COMMIT = "the script commits"
    RETURNED = "the training function returns"
    CLOSED = "the collective is closed"
    PASSED = "a script of Horovod's is between two steps"
    COUNTED = "a script of Horovod's commits, which counts as a step"  # nothing is known of its samples and epochs
    # The same, and nobody is moved by them.
    TICK = "time has passed"
    STACKS_ASKED = "the master wants to see where this worker is stuck"
    BATCHES_OVER = "the loader has no further batch in this epoch"
    EPOCH_ENDED = "the training function goes on to the next epoch"
    CLOCK_RESUMED = "training goes on after what is neither a step nor a pause, such as an evaluation"
    # What the core makes of those and of the events below.
    WORLD = "a world is published"
    TORN_WORLD = "a world is published that is broken already"
    TOLD = "it is told to leave for good, or has lost its master"
    SYNCED = "it stands where rank 0 stands"
    BATCH = "a batch is given"
    VOTE = "the gradients have arrived"
    WRONG_VOTE = "the members do not make the same step"
    STEP = "the parameters have changed"
    LAST_COMMIT = "the script commits after a vote to leave"
    LEFT = "all members leave without a vote"
    FAILURE = "a collective fails"
    RETURNED_ALONE = "the training function returns in a world of one"
    ALL_RETURNED = "all have voted that theirs has returned"
    LAST_WORD = "it says that it has finished or failed"


class Command(Instruction, StrEnum):
    """What is to be done, where there is no more to say."""

    DUMP_STACKS = "print the stacks of all threads"  # to the session
    CAST_END_VOTE = "take part in a step with nothing to add"  # answered by `Voted` or `CollectiveFailed`
    COMPLETE = "all members' training functions have returned"


# ---- events: the session ----


@dataclass(frozen=True, slots=True)
class SessionOpened(Event):
    """A stream to a master is open. ``unsent``: what an earlier stream did not come to send."""

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
class ChangeAnnounced(Event):
    """This world is to be left after a step."""

    world_version: int


@dataclass(frozen=True, slots=True)
class BreakAnnounced(Event):
    """A member of this world is gone."""

    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainOrdered(Event):
    reason: str


@dataclass(frozen=True, slots=True)
class StopOrdered(Event):
    reason: str
    checkpoint: bool


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
class StateMade(Event):
    """There is a training state. ``order``: of its samples, None if the script has a loader of its own.

    ``copies_parameters``: each commit copies them, so that a torn step goes back to the commit.
    """

    progress: Progress
    has_state: bool = False
    order: SampleOrder | None = None
    copies_parameters: bool = False


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """The training state was loaded from a file."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Synced(Event):
    """This member stands where rank 0 stands."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class BatchGiven(Event):
    """A step begins. ``settings_changed``: what the optimizer is told differs from what was saved."""

    plan: StepPlan
    settings_changed: bool = False


@dataclass(frozen=True, slots=True)
class Voted(Event):
    """The gradients of all members have arrived, and with them their votes.

    ``remedy``: what a script should do that has made its step on too few samples. ``device_seconds``: from the
    batch's begin to the end of this worker's passes, by the device's own clock; 0 where host and device go together.
    ``difference``: between the batches of the members, in a line, if they are not the same.
    """

    vote: Vote
    remedy: str = ""
    device_seconds: float = 0.0
    difference: str = ""


@dataclass(frozen=True, slots=True)
class StepMade(Event):
    """The parameters have changed. ``compared``: members of whose states the vote has shown that they were one before; 0 if
    it was not looked at."""

    learning_rate: float
    compared: int = 0


@dataclass(frozen=True, slots=True)
class CollectiveFailed(Event):
    reason: str


@dataclass(frozen=True, slots=True)
class WorldLeft(Event):
    """All members leave the present world together, though no step has voted for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Advanced(Event):
    """Something was done, and this is begun."""

    activity: Activity


@dataclass(frozen=True, slots=True)
class Totals(Event):
    """How much there is to do in all, as far as is known; for the time left."""

    steps: int
    epochs: int


@dataclass(frozen=True, slots=True)
class Said(Event):
    """The script, or a shell, has something for the master. `Finished` and `Failed` are last words."""

    message: Notice | StoreEntry | Finished | Failed


# ---- instructions: to the session ----


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Over the stream, if there is one. `Notice` and `Pause` are kept for the next if this one breaks."""

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
class Connect(Instruction):
    """Enter this world; answered by `Connected` or `CollectiveFailed`."""

    world: World


@dataclass(frozen=True, slots=True)
class Synchronize(Instruction):
    """Bring all members to rank 0's state; answered by `Synced` or `CollectiveFailed`."""

    world: World


@dataclass(frozen=True, slots=True)
class Train(Instruction):
    """Call the training function."""

    world: World


class SaveScope(Enum):
    """What is saved of a training state."""

    WITH_PARAMETERS = "what moves with the parameters: buffers, the learning rate's rule"
    AT_COMMIT = (
        "the user's values and the optimizer's settings; where each commit copies the parameters, all of the state"
    )


@dataclass(frozen=True, slots=True)
class Save(Instruction):
    part: SaveScope


@dataclass(frozen=True, slots=True)
class Restore(Instruction):
    """Go back to what was saved; ``progress`` is where it stands."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class LeaveWorld(Instruction):
    """Close the collective; answered by `Disconnected`."""

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
    """Raise this error; a RuntimeError where the script does what can't be made right."""

    error: type[Exception]
    message: str


@dataclass(frozen=True, slots=True)
class Warn(Instruction):
    message: str
