"""Which workers to launch and which to let go.

It compares how many workers there should be with those there are, so an event that is lost or comes twice changes
nothing. Ids are never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elasticdl.master.core.crashes import Crashes
from elasticdl.master.core.events import ExitCause, WorkerExited
from elasticdl.master.core.exits import CRASHES, Verdict, after_training, judge, misuse
from elasticdl.master.core.lifecycle import WorkerState
from elasticdl.master.core.record import WorkerRecord
from elasticdl.master.core.settings import Settings
from elasticdl.master.core.snapshot import JobSnapshot

DONE = (WorkerState.FINISHED, WorkerState.COMPLETED)
# Of those that are in no world and wait for none, the last in this order are let go first.
_LEAST_USE = {WorkerState.STARTING: 1, WorkerState.PENDING: 2}


@dataclass(frozen=True, slots=True)
class Plan:
    launch: int
    let_go: tuple[WorkerRecord, ...]


class Fleet:
    def __init__(self, records: dict[int, WorkerRecord], settings: Settings, past: JobSnapshot) -> None:
        self._records = records
        self._settings = settings
        self._departures: list[str] = []  # why replacements are due
        self._somebody_joined = bool(past.finished) or any(worker.ready for worker in past.workers)
        self.crashes = Crashes(past.crashes)
        self.next_id = past.next_id

    @property
    def all_completed(self) -> bool:
        """Every process that ran has finished, and none is left but those without a place."""
        states = {record.state for record in self._records.values()}
        idle = states <= {WorkerState.COMPLETED, WorkerState.PENDING}
        return WorkerState.COMPLETED in states and idle and not self.crashes.holding

    @property
    def nobody_comes(self) -> bool:
        """All who are not leaving wait for a place."""
        live = {record.state for record in self._records.values() if record.live}
        return live == {WorkerState.PENDING}

    def joined(self) -> None:
        """A worker has had a session."""
        self._somebody_joined = True

    def departed(self, why: str) -> None:
        self._departures.append(why)

    def exited(self, record: WorkerRecord, event: WorkerExited, now: float, *, world_runs: bool) -> Verdict:
        cause, reason = judge(record, event)
        fatal = warning = ""
        if self._settings.own_program:
            fatal = misuse(record, event, somebody_joined=self._somebody_joined)
            if cause is ExitCause.FINISHED:
                fatal, warning = after_training(event)
        if cause in CRASHES and not fatal:
            self.crashes.count(in_training=record.world_version > 0, now=now)
            if verdict := self.crashes.too_many(world_runs=world_runs):
                fatal = f"{verdict}, last worker {record.worker_id}: {reason}"
        return Verdict(cause, reason, fatal, warning)

    def overstaying(self, now: float) -> list[WorkerRecord]:
        """Those whose time to leave is over."""
        leaving = (WorkerState.DRAINING, WorkerState.FAILED)
        return [r for r in self._late(now) if r.lingers or r.state in leaving]

    def start_timed_out(self, now: float) -> list[WorkerRecord]:
        """Those whose time to get ready is over."""
        return [r for r in self._late(now) if r.live]

    def plan(self, maximum: int, retention_order: Callable[[], Sequence[int]], now: float) -> Plan:
        """``retention_order``: workers in the world or waiting for one, those to keep first."""
        records = self._records.values()
        live = [record for record in records if record.live]
        wanted = maximum - sum(record.state in DONE for record in records)
        if len(live) > max(0, wanted):
            place = {worker_id: index for index, worker_id in enumerate(retention_order())}
            live.sort(key=lambda r: (place.get(r.worker_id, len(place)), _LEAST_USE.get(r.state, 0), r.worker_id))
            self._departures.clear()
            return Plan(0, tuple(reversed(live[max(0, wanted) :])))
        taken = sum(record.holds_place for record in records) + self.crashes.held(now)
        return Plan(max(0, wanted - taken), ())

    def launch(self) -> tuple[WorkerRecord, bool]:
        """A new worker, and whether it replaces another."""
        replaces = bool(self._departures)
        reason = f"in place of one that left: {self._departures.pop(0)}" if replaces else "asked for"
        record = self._records[self.next_id] = WorkerRecord(self.next_id, reason)
        self.next_id += 1
        return record, replaces

    def _late(self, now: float) -> list[WorkerRecord]:
        return [r for r in self._records.values() if r.deadline is not None and now > r.deadline]
