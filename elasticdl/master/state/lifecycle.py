"""What happens to a worker, and to the job: two tables, to be read from top to bottom.

A worker has one state. What happens to it is a trigger: something that it said, that a launcher saw, or that the master
decided. `WORKERS` says, for a state and a trigger, which state follows and what else is done, in order. A pair that is
not in the table changes nothing, since any event may come late or twice.

What happens when a worker is told to leave after its last step? If its word that it has finished came first, it is
FINISHED, for which there is no DRAIN: nothing changes. If the order to leave came first, it is DRAINING, and FINISH
takes it to FINISHED all the same. Only if the others could not complete the training is it made to leave (REOPEN).

`JOB` says the same of the job. `scripts/draw_states.py` draws both tables.
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


class Trigger(Enum):
    # what the launcher saw
    NO_PLACE = "has no place"
    PLACED = "is started"
    EXIT = "exits"
    # what it said, or what became of its session
    CONNECT = "connects"
    CONNECT_IN_WORLD = "connects and is in a world"  # in one that the master may know nothing of
    JOIN = "asks for a world"
    LINGER = "alone has the state, and will leave"
    DRAIN = "leaves"
    FINISH = "has finished"
    FAIL = "fails"
    # what the master decided
    ADOPT = "was in the world that an earlier master formed"
    ENTER = "is in the new world"
    PASS_OVER = "is not in the new world"
    EXCLUDE = "was cut off as its world broke"
    LET_GO = "is one too many"
    DISMISS = "is told that the job ends"
    GIVE_UP = "is silent, stuck or late"
    REOPEN = "finished too early"


class Action(Enum):
    NOTE_PENDING = "write into the journal that there is no place, and why"
    NOTE_STARTED = "write into the journal that it was started"
    NOTE_READY = "write into the journal that it is ready"
    NOTE_DRAINING = "write into the journal that it leaves"
    TAKE_POSITION = "remember which step it stands at, and whether it has the state"
    QUEUE = "let it wait for the next world, from now"
    CHANGE_WORLD = "form a new world; members finish their step first"
    STAY = "let it train until its replacement has the state, or its time is over"
    LEAVE_WORLD = "form a new world, unless that is under way; at once if it says that its world broke"
    BREAK_WORLD = "form a new world; members leave theirs at once (not if it ended well as the job ends)"
    TEAR_WORLD = "as BREAK_WORLD if others are still in its world, unless it ended well"
    EXPLAIN = "if it is why a new world is formed, say now what became of it"
    REPEAT_WORLD = "publish the present world to it again, unless it knows it"
    ORDER = "tell it, maybe again, to leave, or that the job ends"
    BREAK_ITS_WORLD = "tell it that the world it is in goes on without it"
    END_PROCESS = "kill it; a user's own program, which may do without a session, gets SIGTERM"
    KILL = "kill it"
    BLAME = "if the user's code failed, decide that the job has failed"


_S, _T, _A = WorkerState, Trigger, Action
STARTING = (_S.PENDING, _S.STARTING)
ABSENT = (_S.INITIALIZING, _S.STANDBY, _S.REJOINING, _S.EXCLUDED)  # in a session and in no world
# A worker in one of these states counts as one of those that the job has.
LIVE = (*STARTING, _S.INITIALIZING, _S.STANDBY, _S.MEMBER, _S.REJOINING, _S.EXCLUDED)
IN_WORLD = (_S.MEMBER, _S.REJOINING)  # or left it for the next
LEAVING = (_S.DRAINING, _S.FAILED)
DONE = (_S.FINISHED, _S.COMPLETED)
Row = tuple[tuple[WorkerState, ...], Trigger, WorkerState | None, tuple[Action, ...]]

# From one of these states, with this trigger, to that state (None: it stays as it is), with these actions.
ROWS: tuple[Row, ...] = (
    # It starts.
    (STARTING, _T.NO_PLACE, _S.PENDING, (_A.NOTE_PENDING,)),
    (STARTING, _T.PLACED, _S.STARTING, (_A.NOTE_STARTED,)),
    (STARTING, _T.CONNECT, _S.INITIALIZING, ()),
    # It asks for a world, and comes into one.
    ((_S.INITIALIZING, _S.EXCLUDED), _T.JOIN, _S.STANDBY, (_A.TAKE_POSITION, _A.QUEUE, _A.NOTE_READY)),
    ((_S.MEMBER,), _T.JOIN, _S.REJOINING, (_A.TAKE_POSITION, _A.LEAVE_WORLD)),
    ((_S.STANDBY, _S.REJOINING), _T.JOIN, None, (_A.TAKE_POSITION,)),
    ((_S.STANDBY, _S.REJOINING), _T.ENTER, _S.MEMBER, ()),
    ((_S.REJOINING,), _T.PASS_OVER, _S.STANDBY, (_A.QUEUE,)),
    ((*STARTING, _S.INITIALIZING), _T.ADOPT, _S.MEMBER, ()),
    ((_S.DRAINING,), _T.ADOPT, None, (_A.CHANGE_WORLD,)),
    ((_S.FAILED, _S.KILLING), _T.ADOPT, None, (_A.BREAK_WORLD,)),
    # Its session broke, and it is back.
    ((_S.STANDBY,), _T.CONNECT, None, (_A.QUEUE,)),
    ((_S.STANDBY,), _T.CONNECT_IN_WORLD, None, (_A.QUEUE,)),
    ((_S.MEMBER,), _T.CONNECT, None, (_A.REPEAT_WORLD,)),
    ((_S.MEMBER,), _T.CONNECT_IN_WORLD, None, (_A.REPEAT_WORLD,)),
    ((_S.MEMBER,), _T.EXCLUDE, _S.EXCLUDED, (_A.BREAK_WORLD,)),
    ((*STARTING, _S.INITIALIZING, _S.EXCLUDED), _T.CONNECT_IN_WORLD, _S.EXCLUDED, (_A.BREAK_ITS_WORLD,)),
    ((_S.DRAINING,), _T.CONNECT, None, (_A.ORDER,)),
    ((_S.DRAINING,), _T.CONNECT_IN_WORLD, None, (_A.ORDER,)),
    # It leaves, by itself (SIGTERM) or because it is told to.
    ((_S.MEMBER, _S.REJOINING), _T.LINGER, None, (_A.NOTE_DRAINING, _A.STAY)),
    ((*STARTING, *ABSENT), _T.DRAIN, _S.DRAINING, (_A.NOTE_DRAINING,)),
    ((_S.MEMBER,), _T.DRAIN, _S.DRAINING, (_A.NOTE_DRAINING, _A.CHANGE_WORLD)),
    (STARTING, _T.LET_GO, _S.DRAINING, (_A.NOTE_DRAINING, _A.KILL)),
    (ABSENT, _T.LET_GO, _S.DRAINING, (_A.NOTE_DRAINING, _A.ORDER)),
    ((_S.MEMBER,), _T.LET_GO, _S.DRAINING, (_A.NOTE_DRAINING, _A.CHANGE_WORLD, _A.ORDER)),
    # The job ends.
    ((_S.PENDING,), _T.DISMISS, _S.DRAINING, (_A.KILL,)),
    ((_S.STARTING,), _T.DISMISS, _S.DRAINING, (_A.END_PROCESS,)),
    ((*ABSENT, _S.MEMBER, _S.DRAINING), _T.DISMISS, _S.DRAINING, (_A.ORDER,)),
    # Its training is complete, whatever it was told meanwhile.
    ((*LIVE, _S.DRAINING, _S.KILLING), _T.FINISH, _S.FINISHED, ()),
    ((_S.FINISHED,), _T.EXIT, _S.COMPLETED, ()),
    # Rank 0 was lost before it finished, or others go on: its place is given to another.
    ((_S.FINISHED,), _T.REOPEN, _S.DRAINING, ()),
    ((_S.COMPLETED,), _T.REOPEN, _S.GONE, ()),
    # It can't go on.
    ((*STARTING, *ABSENT), _T.FAIL, _S.FAILED, (_A.EXPLAIN, _A.BLAME)),
    ((_S.MEMBER,), _T.FAIL, _S.FAILED, (_A.BREAK_WORLD, _A.BLAME)),
    ((_S.DRAINING,), _T.FAIL, _S.FAILED, (_A.TEAR_WORLD, _A.BLAME)),
    ((_S.FINISHED,), _T.FAIL, None, (_A.BLAME,)),
    # It is given up.
    ((*STARTING, *ABSENT, _S.FAILED), _T.GIVE_UP, _S.KILLING, (_A.EXPLAIN, _A.KILL)),
    ((_S.MEMBER,), _T.GIVE_UP, _S.KILLING, (_A.BREAK_WORLD, _A.KILL)),
    ((_S.DRAINING,), _T.GIVE_UP, _S.KILLING, (_A.TEAR_WORLD, _A.KILL)),
    # Its process is gone.
    ((*STARTING, *ABSENT), _T.EXIT, _S.GONE, (_A.EXPLAIN,)),
    ((_S.MEMBER,), _T.EXIT, _S.GONE, (_A.BREAK_WORLD,)),
    ((_S.DRAINING,), _T.EXIT, _S.GONE, (_A.TEAR_WORLD,)),
    ((_S.FAILED, _S.KILLING), _T.EXIT, _S.GONE, ()),
)
WORKERS: Mapping[tuple[WorkerState, Trigger], tuple[WorkerState, tuple[Action, ...]]] = {
    (state, trigger): (following or state, actions) for states, trigger, following, actions in ROWS for state in states
}


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
