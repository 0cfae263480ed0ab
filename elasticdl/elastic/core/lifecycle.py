"""What becomes of a worker, seen from inside: its states, what moves it from one to the next, and what it does then.

Read the table from top to bottom to learn what happens when. `elasticdl.elastic.core.worker` has the actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from elasticdl.elastic.core.protocol import Trigger


class WorkerState(StrEnum):
    PREPARING = "preparing"  # has not asked for a world: it imports, builds its model, or is between two trainings
    WAITING = "waiting"  # has asked for a world
    CONNECTING = "connecting"  # has a world, whose collective is being connected
    SYNCING = "syncing"  # the members are brought to rank 0's state
    TRAINING = "training"  # in the training function; where in a step, its position says
    ENDING = "ending"  # its training function has returned, and those of the others are awaited
    COMPLETE = "complete"  # all training functions have returned
    LEAVING = "leaving its world"  # the collective is being closed; it asks for the next world then
    GONE = "gone"  # it leaves for good


S = WorkerState
IN_TRAINING = (S.TRAINING, S.ENDING)
IN_WORLD = (S.CONNECTING, S.SYNCING, *IN_TRAINING, S.COMPLETE)
# Steps that a script makes before it asks for a world are its own.
MAKES_STEPS = (S.PREPARING, S.TRAINING)


# States, what happens, the next state, and what is done: a method of `WorkerCore`.
_ROWS: Sequence[tuple[tuple[WorkerState, ...], Trigger, WorkerState, str]] = (
    # It asks for a world, and gets one or is told to leave.
    ((S.PREPARING, S.SYNCING, S.TRAINING, S.COMPLETE), Trigger.READY, S.WAITING, "ask"),
    ((S.LEAVING,), Trigger.CLOSED, S.WAITING, "ask"),
    ((S.WAITING,), Trigger.WORLD, S.CONNECTING, "enter"),
    ((S.WAITING,), Trigger.TORN_WORLD, S.WAITING, "ask_again"),
    ((S.WAITING,), Trigger.TOLD, S.GONE, "leave_job"),
    # All members connect, and are brought to one state.
    ((S.CONNECTING,), Trigger.CONNECTED, S.SYNCING, "synchronize"),
    ((S.SYNCING,), Trigger.SYNCED, S.TRAINING, "train"),
    # The world is left: together, mostly after a vote, or at once because it broke.
    (IN_WORLD, Trigger.LEFT, S.LEAVING, "leave_together"),
    (IN_WORLD, Trigger.FAILURE, S.LEAVING, "leave_broken"),
    # The end: nobody is done before all are, so that a member that is lost has somebody to do its part.
    ((S.TRAINING,), Trigger.RETURNED, S.ENDING, "cast_end_vote"),
    ((S.TRAINING,), Trigger.RETURNED_ALONE, S.COMPLETE, "complete"),
    ((S.ENDING,), Trigger.ALL_RETURNED, S.COMPLETE, "complete"),
    (tuple(S), Trigger.LAST_WORD, S.GONE, "say_last_word"),
    ((S.GONE,), Trigger.READY, S.GONE, "leave_job"),
)
# What is not in the table changes nothing.
TABLE: Mapping[tuple[WorkerState, Trigger | None], tuple[WorkerState, str]] = {
    (before, trigger): (state, action) for states, trigger, state, action in _ROWS for before in states
}
