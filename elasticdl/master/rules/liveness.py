"""What heartbeats tell of workers. `elasticdl.master.rules.watching` judges from that who is silent or stuck."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.job.messages import Heartbeat
from elasticdl.master.rules.progress_limits import ProgressLimits
from elasticdl.master.state.records_by_state import Records
from elasticdl.master.state.states import WorkerState


class Liveness:
    def __init__(self, records: Records, heartbeat_timeout: float, progress_limits: ProgressLimits) -> None:
        self._records = records
        self._heartbeat_timeout = heartbeat_timeout
        self._progress_limits = progress_limits
        self._looked: float | None = None
        self.save_problem = ""  # why the state can't be saved, if so: then what was decided is not carried out

    def heard(self, worker_id: int, beat: Heartbeat, now: float) -> None:
        record = self._records.get(worker_id)
        if record is None or record.pulse is None or not record.connected:
            return
        pulse = record.pulse
        if record.state in (WorkerState.MEMBER, WorkerState.DRAINING):
            pulse.steps += record.step != beat.step
            record.step = beat.step
        if beat.progress != pulse.progress:
            # What was heard late, since the master was held up, says nothing about how long the member took.
            if record.state is WorkerState.MEMBER and not self._was_absent(now):
                self._progress_limits.moved(pulse, now)
            pulse.progress, pulse.moved = beat.progress, now
        pulse.heard, pulse.waiting = now, beat.waiting
        self._progress_limits.ending = self._progress_limits.ending or beat.ending
        pulse.times = beat.times if beat.world_version == record.world_version else None

    def restart(self, worker_ids: Sequence[int], now: float) -> None:
        """Something new was asked of them: time without progress counts from now."""
        for worker_id in worker_ids:
            if (record := self._records.get(worker_id)) and record.pulse:
                record.pulse.moved, record.pulse.waiting, record.pulse.steps = now, False, 0

    def forgive_own_absence(self, now: float) -> float:
        """With each tick. Time in which the master could not hear or act counts against no worker; returns how much.

        It could not hear while it was held up itself, and can't act while its state can't be saved.
        """
        was_absent, absence = self._was_absent(now), now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if not was_absent and not self.save_problem:
            return 0.0
        self._progress_limits.forgive(absence)
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
