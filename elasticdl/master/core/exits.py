"""What the exit of a worker's process means.

| what became of the worker                       | what follows                                                     |
| ----------------------------------------------- | ---------------------------------------------------------------- |
| drained, killed, frozen, preempted, evicted,    | it is replaced at once, and no count is kept                     |
|   node lost, deleted                            |                                                                  |
| crashed, out of memory                          | it is replaced after a delay that doubles with each in a row     |
| three crashed in a row before reaching a world, | the job fails                                                    |
|   and no world is running                       |                                                                  |
| too many crashed after having trained           | the job fails; training on for a while clears the count          |
| ended with code 0 and never asked for a world   | the job fails: the program does not train with others            |
| finished                                        | it is not replaced                                               |

If several things befell it, the cause is what the cluster did; else what the worker said of itself; else why the master
gave it up; else its exit code.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.master.core.events import ExitCause, WorkerExited
from elasticdl.master.core.lifecycle import WorkerState
from elasticdl.master.core.record import WorkerRecord

# These causes stand even if the master has killed the worker itself. (DELETED does not: its own kill looks like that.)
_BY_THE_CLUSTER = (ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST)
CRASHES = (ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY)
_REMEDY = "train in a function below @elastic.run and call it (docs/library.md)"
NEVER_JOINED = (
    "ended with exit code 0 and took no part in the job: each process trains for itself unless the script calls "
    f"elasticdl.elastic.torch.init() (or that of elastic.keras) first; then {_REMEDY}"
)
INIT_ONLY = f"ended with exit code 0 after elastic.init() and has not trained together with others: {_REMEDY}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an exit means. ``fatal``, if not empty, is why the job can't go on, ``warning`` what a person must know."""

    cause: ExitCause
    reason: str
    fatal: str = ""
    warning: str = ""


def judge(record: WorkerRecord, event: WorkerExited) -> tuple[ExitCause, str]:
    told = event.cause.replace("_", " ") + (f": {event.detail}" if event.detail else "")
    if record.state is WorkerState.FINISHED:
        return ExitCause.FINISHED, "finished"
    if event.cause in _BY_THE_CLUSTER:
        return event.cause, told
    if record.failure:
        return ExitCause.CRASHED, record.failure
    if record.state is WorkerState.KILLING:
        return ExitCause.FROZEN, record.reason
    if (record.state is WorkerState.DRAINING or record.lingers) and event.cause is not ExitCause.DELETED:
        return ExitCause.DRAINED, record.reason
    if event.cause is not ExitCause.CLEAN:
        return event.cause, told
    if record.unheard:  # one that had finished waits until a master has heard it
        return ExitCause.DRAINED, "left while there was no master"
    return ExitCause.CRASHED, "ended with exit code 0 before its training was complete"


def misuse(record: WorkerRecord, event: WorkerExited, *, somebody_joined: bool) -> str:
    """Why a user's own program that ended with code 0 has not trained with others, if it has not; no other would."""
    untrained = (WorkerState.PENDING, WorkerState.STARTING, WorkerState.INITIALIZING)
    if event.cause is not ExitCause.CLEAN or record.state not in untrained or record.ready or record.unheard:
        return ""
    if record.state is WorkerState.INITIALIZING:
        return f"worker {record.worker_id} {INIT_ONLY}"
    return "" if somebody_joined else f"worker {record.worker_id} {NEVER_JOINED}"


def after_training(event: WorkerExited) -> tuple[str, str]:
    """Why the job fails, or what is to be said, when a user's own program ends badly after it has finished training."""
    if event.code == 0:
        return "", ""
    late = f"worker {event.worker_id} {event.cause.replace('_', ' ')} after its training was complete: {event.detail}"
    if event.cause in CRASHES:
        return late, ""
    return "", f"{late}; what its program does after training may not have been done"
