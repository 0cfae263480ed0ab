"""Who is silent and who is stuck, judged from heartbeats.

Silent: no sign of life for `heartbeat_timeout`, or no session for as long. A worker that has not yet asked for a world
may be importing or reading data, during which Python can't send heartbeats: it has until its deadline.
Stuck: its count of progress stands still for longer than `elasticdl.master.rules.patience` allows. Not stuck is who waits inside a collective for others;
if all members wait, their collective hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elasticdl.master.rules.patience import Patience
from elasticdl.master.state.events import HeartbeatReceived
from elasticdl.master.state.lifecycle import WorkerState
from elasticdl.master.state.worker_record import Pulse, WorkerRecord

# Of `heartbeat_timeout`: later than workers leave a dump (`elasticdl.elastic.link.witness`), and in time for it to be read.
ASK_SHARE = 0.7


class Liveness:
    def __init__(self, records: Mapping[int, WorkerRecord], heartbeat_timeout: float, patience: Patience) -> None:
        self._records = records
        self._heartbeat_timeout = heartbeat_timeout
        self.patience = patience
        self._looked: float | None = None
        self.save_problem = ""  # why the state can't be saved, if so: then what was decided is not carried out

    def heard(self, event: HeartbeatReceived, now: float) -> None:
        record = self._records.get(event.worker_id)
        if record is None or record.pulse is None or not record.connected:
            return
        pulse = record.pulse
        if record.state in (WorkerState.MEMBER, WorkerState.DRAINING):
            pulse.steps += record.step != event.step
            record.step = event.step
        if event.progress != pulse.progress:
            # What was heard late, since the master was held up, says nothing about how long the member took.
            if record.state is WorkerState.MEMBER and not self._was_absent(now):
                self.patience.moved(pulse, now)
            pulse.progress, pulse.moved = event.progress, now
        pulse.heard, pulse.waiting = now, event.waiting
        self.patience.ending = self.patience.ending or event.ending
        pulse.times = event.times if event.world_version == record.world_version else None

    def restart(self, worker_ids: Sequence[int], now: float) -> None:
        """Something new was asked of them: time without progress counts from now."""
        for worker_id in worker_ids:
            if (record := self._records.get(worker_id)) and record.pulse:
                record.pulse.moved, record.pulse.waiting, record.pulse.steps = now, False, 0

    def forgive_own_absence(self, now: float) -> float:
        """To be called regularly. Time in which the master could not hear or act counts against no worker; how much.

        It could not hear while it was held up itself, and can't act while its state can't be saved.
        """
        was_absent, absence = self._was_absent(now), now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if not was_absent and not self.save_problem:
            return 0.0
        self.patience.forgive(absence)
        for record in self._records.values():
            if record.pulse:
                record.pulse.heard = min(now, record.pulse.heard + absence)
                record.pulse.moved = min(now, record.pulse.moved + absence)
            if record.deadline is not None:
                record.deadline += absence
            if record.quiet_since is not None:
                record.quiet_since += absence
            if record.suspicion is not None:
                record.suspicion.asked += absence
        return absence

    def _was_absent(self, now: float) -> bool:
        """Whether the master was held up itself since it looked last."""
        return self._looked is not None and now - self._looked > self._heartbeat_timeout / 2

    def silent(self, now: float) -> list[tuple[WorkerRecord, str]]:
        """Who is to be given up, and why."""
        limit = self._heartbeat_timeout
        return [
            (record, f"{'no heartbeat' if record.connected else 'no connection'} for {limit:g} s")
            for record in self._records.values()
            if record.pulse and now - record.pulse.heard > limit and (record.ready or not record.connected)
        ]

    def nearly_silent(self, now: float) -> list[WorkerRecord]:
        """Of whom nothing was heard for most of the time after which they are given up: by now they have left a dump."""
        limit = ASK_SHARE * self._heartbeat_timeout
        return [
            record
            for record in self._records.values()
            if record.pulse and now - record.pulse.heard > limit and (record.ready or not record.connected)
        ]

    def still(
        self, records: Sequence[WorkerRecord], now: float, limit: Callable[[Pulse | None], float]
    ) -> list[WorkerRecord]:
        """Those among them whose count of progress stands still."""
        return [r for r in records if r.pulse and now - r.pulse.moved > limit(r.pulse)]
