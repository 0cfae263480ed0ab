"""Which workers to launch and which to let go, and what it means when one's process has ended.

`Fleet` compares how many workers there should be with those there are, so an event that is lost or comes twice changes
nothing. Ids are never used again.

| what became of the worker                       | what follows                                                     |
| ----------------------------------------------- | ---------------------------------------------------------------- |
| drained, killed, frozen, preempted, evicted,    | it is replaced at once, and no count is kept                     |
|   node lost, deleted                            |                                                                  |
| crashed, out of memory                          | it is replaced after a delay that doubles with each in a row     |
| three crashed in a row before reaching a world, | the job fails                                                    |
|   and no world is running                       |                                                                  |
| too many crashed after having trained           | the job fails; training on for a while clears the count          |
| ended with code 0 and never asked for a world   | the job fails: the program does not train with others            |
| could not start, while others can train         | it is replaced after a delay; after four in a row in its place   |
|                                                 | no more, until the job is scaled                                 |
| finished                                        | it is not replaced                                               |

If several things befell it, the cause is what the cluster did; else what the worker said of itself; else why the master
gave it up; else its exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elasticdl.master.state.events import ExitCause, WorkerExited, WorkerFailed
from elasticdl.master.state.lifecycle import DONE, WorkerState
from elasticdl.master.state.records import Records
from elasticdl.master.state.snapshot import CrashSnapshot, JobSnapshot
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
_DOUBLINGS = 16
CRASHES_AT_START = 3
# In one place. Storage that is away for some seconds must not cost the job a place.
TRIES_OF_PLACE = 4
_DELAY_GROWS = 4
CRASHES_IN_TRAINING = 10
# So many steps without a crash clear the count.
STEPS_TO_FORGET_CRASHES = 100
# These causes stand even if the master has killed the worker itself. (DELETED does not: its own kill looks like that.)
_BY_THE_CLUSTER = (ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST)
CRASHES = (ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY)
_REMEDY = "train in a function below @elastic.run and call it (docs/library.md)"
NEVER_JOINED = (
    "ended with exit code 0 and took no part in the job: each process trains for itself unless the script uses elasticdl.elastic: "
    'torch.prepare() for a plain loop, Trainer(strategy="elastic") of Lightning, transformers.Trainer, keras.models.Model for '
    f"Keras's fit, or init(): then {_REMEDY}"
)
# A program ends with this code that refuses its arguments, or what it is to do.
REFUSES = 2
INIT_ONLY = f"ended with exit code 0 after elastic.init() and has not trained together with others: {_REMEDY}"
# Of those that are in no world and wait for none, the last in this order are let go first.
_LEAST_USE = {WorkerState.STARTING: 1, WorkerState.PENDING: 2}


def judge(record: WorkerRecord, event: WorkerExited) -> tuple[ExitCause, str]:
    told = event.cause.replace("_", " ") + (f": {event.detail}" if event.detail else "")
    report = record.suspicion.report if record.suspicion else None
    if report and report.unreached:
        told += f"; it had not reached the master{report}"
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


def refusal(record: WorkerRecord, event: WorkerExited) -> str:
    """Why a user's own program has refused to train, if it has; no other would do better."""
    if event.code != REFUSES or event.cause is not ExitCause.CRASHED or record.ready or record.failure:
        return ""
    return f"worker {record.worker_id} has refused to train: {event.detail}"


def after_training(event: WorkerExited, step: int) -> tuple[str, str]:
    """Why the job fails, or what is to be said, when a user's own program ends badly after it has finished training.

    Whether all of its training was meant to be over, only the program knows: it may have left its loop by an exit.
    """
    if event.code == 0:
        return "", ""
    how = (
        event.detail
        if event.code > 0 and event.cause is ExitCause.CRASHED
        else f"{event.cause.replace('_', ' ')}: {event.detail}"
    )
    late = f"worker {event.worker_id} has left its training after step {step} and ended: {how}"
    if event.cause in CRASHES:
        return late, ""
    return "", f"{late}; what its program does after training may not have been done"


@dataclass(frozen=True, slots=True)
class Departure:
    """Of a worker that is to be replaced. ``away_from``: its node, if that may be to blame. ``tries``: see `WorkerRecord`."""

    reason: str
    away_from: str
    tries: int = 0


class Crashes:
    """Counts crashes: says how long a replacement has to wait, and when the job can't go on."""

    def __init__(self, past: CrashSnapshot) -> None:
        self.counts = past
        self._held_until: list[float] = []  # one for each replacement that has to wait; not saved, as time passes

    def trained(self, steps: int) -> None:
        since = self.counts.steps_since + steps
        in_training = 0 if since >= STEPS_TO_FORGET_CRASHES else self.counts.in_training
        self.counts = replace(self.counts, steps_since=since, in_training=in_training)

    def reached_world(self) -> None:
        """Workers do get through their start."""
        self.counts = replace(self.counts, at_start=0)

    def held(self, now: float) -> int:
        """How many replacements have to wait at this time."""
        self._held_until = [time for time in self._held_until if time > now]
        return len(self._held_until)

    @property
    def holding(self) -> bool:
        """Whether a replacement had to wait when `held` was last asked."""
        return bool(self._held_until)

    def count(self, *, in_training: bool, now: float) -> None:
        """One more; its replacement waits the longer, the more there were in a row."""
        before = self.counts
        self.counts = replace(
            before,
            at_start=before.at_start + (not in_training),
            in_training=before.in_training + in_training,
            steps_since=0,
        )
        in_a_row = min(max(self.counts.at_start, self.counts.in_training), _DOUBLINGS)
        self._hold(FIRST_DELAY * 2 ** (in_a_row - 1), now)

    def count_unfit(self, tries: int, now: float) -> None:
        """So many in a row could not start in a place, where others train."""
        self._hold(FIRST_DELAY * _DELAY_GROWS ** (tries - 1), now)

    def _hold(self, delay: float, now: float) -> None:
        self._held_until.append(now + min(LONGEST_DELAY, delay))

    def too_many(self, *, world_runs: bool) -> str:
        """Why it makes no sense to go on, if so."""
        if self.counts.at_start >= CRASHES_AT_START and not world_runs:
            return f"{self.counts.at_start} workers in a row failed at the start"
        if self.counts.in_training >= CRASHES_IN_TRAINING:
            return f"{self.counts.in_training} workers crashed in training"
        return ""


class Fleet:
    def __init__(self, records: Records, settings: Settings, past: JobSnapshot) -> None:
        self._records = records
        self._settings = settings
        self.departures: list[Departure] = []  # for which replacements are due
        self.somebody_joined = bool(past.finished) or any(worker.ready for worker in past.workers)
        self.crashes = Crashes(past.crashes)
        self.next_id = past.next_id

    @property
    def all_completed(self) -> bool:
        """Every process that ran has finished, and none is left but those without a place."""
        completed, pending = (self._records.count(state) for state in (WorkerState.COMPLETED, WorkerState.PENDING))
        return bool(completed) and completed + pending == len(self._records) and not self.crashes.holding

    @property
    def nobody_comes(self) -> bool:
        """All who are not leaving wait for a place."""
        return 0 < self._records.count(WorkerState.PENDING) == self._records.live

    def failed(self, record: WorkerRecord, event: WorkerFailed, *, begun: bool) -> WorkerFailed:
        """A worker has said that it can't go on; returns what is to be made of it: where others train, one that has not is alone
        to blame, and not the user's code."""
        if record.state is not WorkerState.FINISHED:
            record.failure = record.failure or event.message
        if event.trained or not self._others_train(record, begun=begun):
            return event
        record.unfit = True
        return replace(event, users=False)

    def exited(
        self,
        record: WorkerRecord,
        event: WorkerExited,
        now: float,
        *,
        runs: bool,
        begun: bool,
        least: int,
        step: int = 0,
    ) -> tuple[ExitCause, str, str, str]:
        """Why, in a word and for people; why the job can't go on, if so; and what a person must know, if anything.

        ``runs``: a world does. ``begun``: the job has made a step. ``least``: workers with which it goes on. ``step``: up to
        which training has come.
        """
        cause, reason = judge(record, event)
        fatal = warning = ""
        if self._settings.own_program:
            fatal = misuse(record, event, somebody_joined=self.somebody_joined) or refusal(record, event)
            if cause is ExitCause.FINISHED:
                fatal, warning = after_training(event, step)
        if cause not in CRASHES or fatal:
            record.tries = 0
        elif record.unfit or (not record.ready and self._others_train(record, begun=begun)):
            fatal, warning = self._try_again(record, reason, least, now)
        else:
            record.tries = 0
            self.crashes.count(in_training=record.world_version > 0, now=now)
            if verdict := self.crashes.too_many(world_runs=runs):
                fatal = f"{verdict}, last worker {record.worker_id}: {reason}"
        return cause, reason, fatal, warning

    def _others_train(self, record: WorkerRecord, *, begun: bool) -> bool:
        """Others than this worker have trained. A master that took over may not have heard of a step yet."""
        return begun or any(each.step > 0 for each in self._records.values() if each is not record)

    def miss(self, record: WorkerRecord, why: str) -> None:
        """Its place is to be taken by another, unless nobody could start there."""
        if record.tries < TRIES_OF_PLACE:
            self.departures.append(Departure(why, record.node if record.slow else "", record.tries))

    def _try_again(self, record: WorkerRecord, reason: str, least: int, now: float) -> tuple[str, str]:
        """A worker could not start. Why the job can't go on, if so; and what a person must know, if anything."""
        record.tries += 1
        if record.tries < TRIES_OF_PLACE:
            self.crashes.count_unfit(record.tries, now)
            return "", ""
        others = sum(each.holds_place for each in self._records.values() if each is not record)
        most = others + self.crashes.held(now)
        why = f"{record.tries} workers in a row could not start, last worker {record.worker_id}: {reason}"
        if most < least:
            return why, ""
        self.crashes.counts = replace(self.crashes.counts, most=most, given_up=why)
        workers = f"{most} worker{'s' if most > 1 else ''}"
        return "", f"{why}; the job goes on with {workers}, and tries again when it is scaled (`elasticdl scale`)"

    def try_all(self) -> None:
        """Somebody has scaled the job: what could not start may start now."""
        self.crashes.counts = replace(self.crashes.counts, most=0, given_up="")

    def plan(
        self, maximum: int, retention_order: Callable[[], Sequence[int]], now: float
    ) -> tuple[int, list[WorkerRecord]]:
        """How many to launch, and whom to let go.

        ``retention_order``: workers in the world or waiting for one, those to keep first.
        """
        records = self._records.values()
        live = [record for record in records if record.live]
        wanted = maximum - sum(record.state in DONE for record in records)
        if len(live) > max(0, wanted):
            place = {worker_id: index for index, worker_id in enumerate(retention_order())}
            live.sort(key=lambda r: (place.get(r.worker_id, len(place)), _LEAST_USE.get(r.state, 0), r.worker_id))
            self.departures.clear()
            return 0, live[max(0, wanted) :][::-1]
        taken = sum(record.holds_place for record in records) + self.crashes.held(now)
        return max(0, min(wanted, self.crashes.counts.most or wanted) - taken), []

    def launch(self) -> tuple[WorkerRecord, Departure | None]:
        """A new worker, and which other's place it takes, if it does."""
        departure = self.departures.pop(0) if self.departures else None
        reason = f"in place of another: {departure.reason}" if departure else "asked for"
        record = self._records[self.next_id] = WorkerRecord(self.next_id, reason)
        record.tries = departure.tries if departure else 0
        self.next_id += 1
        return record, departure
