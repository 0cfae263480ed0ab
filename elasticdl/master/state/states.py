"""In which states a worker can be, and in which phases a job: what follows what.

A worker has one state; `elasticdl.master.core.transitions` has the table of what changes it. `JOB` is the table of the job's phases.
`scripts/draw_states.py` draws both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

from elasticdl.master.state.values import Phase


class WorkerState(StrEnum):
    PENDING = "pending"  # asked for; the launcher has no place for it
    STARTING = "starting"  # asked for, or its process has started; has had no session
    INITIALIZING = "initializing"  # has had a session, and has not asked for a world: imports, reads data
    STANDBY = "standby"  # has asked for a world, and is in none
    MEMBER = "member"  # is in the present world
    REJOINING = "rejoining"  # was in the present world, and has asked for the next
    EXCLUDED = "excluded"  # a world goes on without it, which it may not know; has yet to ask for the next
    DRAINING = "draining"  # was told to leave
    FINISHED = "finished"  # its training is complete; its process still runs
    COMPLETED = "completed"  # has finished, and its process is gone
    FAILED = "failed"  # said that it can't go on; its process should end
    KILLING = "killing"  # given up; its process is being killed; of what it says only that it has finished counts
    GONE = "gone"  # its process is gone, and with it the record


STARTING = (WorkerState.PENDING, WorkerState.STARTING)
ABSENT = (
    WorkerState.INITIALIZING,
    WorkerState.STANDBY,
    WorkerState.REJOINING,
    WorkerState.EXCLUDED,
)  # in a session and in no world
# A worker in one of these states counts as one of those that the job has.
LIVE = (
    *STARTING,
    WorkerState.INITIALIZING,
    WorkerState.STANDBY,
    WorkerState.MEMBER,
    WorkerState.REJOINING,
    WorkerState.EXCLUDED,
)
IN_WORLD = (WorkerState.MEMBER, WorkerState.REJOINING)  # or left it for the next
LEAVING = (WorkerState.DRAINING, WorkerState.FAILED)
DONE = (WorkerState.FINISHED, WorkerState.COMPLETED)


class Condition(Enum):
    """What is so of the job, after each event."""

    LISTENING = "the master was started again, and does not know yet"
    NO_WORLD = "there was no world yet"
    PROGRAMS_RUN = "the user's own programs run, and need no world"
    TRAINING = "a world stands or is formed"
    TOO_FEW = "a world can't be formed"
    DECIDED = "its end is decided"
    SUCCEEDED = "all are gone: training was complete"
    FAILED = "all are gone: it had failed"
    STOPPED = "all are gone: it was stopped"


JOB: Mapping[tuple[Phase, Condition], Phase] = {
    (Phase.PENDING, Condition.PROGRAMS_RUN): Phase.RUNNING,
    (Phase.RUNNING, Condition.NO_WORLD): Phase.PENDING,  # the programs are gone, and are started again
    (Phase.PENDING, Condition.TRAINING): Phase.RUNNING,
    (Phase.WAITING, Condition.TRAINING): Phase.RUNNING,
    (Phase.WAITING, Condition.PROGRAMS_RUN): Phase.RUNNING,
    (Phase.PENDING, Condition.TOO_FEW): Phase.WAITING,
    (Phase.RUNNING, Condition.TOO_FEW): Phase.WAITING,
    (Phase.PENDING, Condition.DECIDED): Phase.STOPPING,
    (Phase.RUNNING, Condition.DECIDED): Phase.STOPPING,
    (Phase.WAITING, Condition.DECIDED): Phase.STOPPING,
    (Phase.STOPPING, Condition.SUCCEEDED): Phase.SUCCEEDED,
    (Phase.STOPPING, Condition.FAILED): Phase.FAILED,
    (Phase.STOPPING, Condition.STOPPED): Phase.STOPPED,
}
