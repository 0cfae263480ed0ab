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


_S = WorkerState
STARTING = (_S.PENDING, _S.STARTING)
ABSENT = (_S.INITIALIZING, _S.STANDBY, _S.REJOINING, _S.EXCLUDED)  # in a session and in no world
# A worker in one of these states counts as one of those that the job has.
LIVE = (*STARTING, _S.INITIALIZING, _S.STANDBY, _S.MEMBER, _S.REJOINING, _S.EXCLUDED)
IN_WORLD = (_S.MEMBER, _S.REJOINING)  # or left it for the next
LEAVING = (_S.DRAINING, _S.FAILED)
DONE = (_S.FINISHED, _S.COMPLETED)


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


_P, _C = Phase, Condition
JOB: Mapping[tuple[Phase, Condition], Phase] = {
    (_P.PENDING, _C.PROGRAMS_RUN): _P.RUNNING,
    (_P.RUNNING, _C.NO_WORLD): _P.PENDING,  # the programs are gone, and are started again
    (_P.PENDING, _C.TRAINING): _P.RUNNING,
    (_P.WAITING, _C.TRAINING): _P.RUNNING,
    (_P.WAITING, _C.PROGRAMS_RUN): _P.RUNNING,
    (_P.PENDING, _C.TOO_FEW): _P.WAITING,
    (_P.RUNNING, _C.TOO_FEW): _P.WAITING,
    (_P.PENDING, _C.DECIDED): _P.STOPPING,
    (_P.RUNNING, _C.DECIDED): _P.STOPPING,
    (_P.WAITING, _C.DECIDED): _P.STOPPING,
    (_P.STOPPING, _C.SUCCEEDED): _P.SUCCEEDED,
    (_P.STOPPING, _C.FAILED): _P.FAILED,
    (_P.STOPPING, _C.STOPPED): _P.STOPPED,
}
