"""The first moments of a master that follows another: until it knows what there is, it listens and decides nothing.

Workers go on training meanwhile. What they and the launcher say is held back. Once every worker that may be in a world has
been heard of, or the time for that is over, the master adopts the world that it remembers, and acts upon what was held back, in
order. So an intact world stays, and who died in between is missing. If somebody knows of a newer world, the state that was saved is
not the last: all are told that their world is broken, and form another.

The time is long, as the new master's address may take long to be known everywhere. It is cut short if waiting holds up
training: a member is back, so the address is known, and none of those that are back makes progress, so their world is
broken or hangs. Then those missing have as long as any worker that is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.job.messages import Ask, Heartbeat, Hello
from elasticdl.master.core import events
from elasticdl.master.core.events import ExitCause, Instruction, KillWorker, Record
from elasticdl.master.core.transitions import started
from elasticdl.master.core.values import LEAVING, LIVE, STARTING, Settings, WorkerState, World
from elasticdl.master.core.worker_record import JobSnapshot, Records, WorkerRecord, WorkerSnapshot


def _restore(found: events.FoundWorker, known: WorkerSnapshot | None, settings: Settings, now: float) -> WorkerRecord:
    if known is None:
        state = WorkerState.STARTING if found.host else WorkerState.PENDING
        known = WorkerSnapshot(found.worker_id, state, "found by this master")
    state, reason = known.state, known.reason
    if state in LIVE and state not in STARTING:
        state = WorkerState.INITIALIZING
    elif state is WorkerState.PENDING and found.host:  # it has its place now
        state, reason = WorkerState.STARTING, ""
    record = WorkerRecord(found.worker_id, reason, state, found.host, found.node, found.pid)
    record.unheard, record.ready = True, known.ready
    record.quiet_since = now if found.host and state in (WorkerState.STARTING, WorkerState.INITIALIZING) else None
    record.world_version, record.failure, record.place_id = (
        known.world_version,
        known.failure,
        found.place or known.place,
    )
    own = settings.own_program and state is WorkerState.STARTING  # it may never connect
    if state in LEAVING:
        record.deadline = now + settings.stop_grace
    elif state in LIVE and found.host and not own:
        record.deadline = now + settings.start_timeout
    return record


class Recovery:
    """What a job hears until it knows what there is. It makes the records of those that are found; the job does the rest."""

    def __init__(self, records: Records, settings: Settings, past: JobSnapshot) -> None:
        self._records = records
        self._settings = settings
        self._past = past
        self._since: float | None = None
        self._news = 0.0  # when somebody last came back, or was seen to train
        self._progress: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._newest = 0  # world that somebody is in, or has left
        self.held: list[events.Event] = []

    @property
    def begun(self) -> bool:
        return self._since is not None

    # ---- what is heard ----

    def begin(self, found: Sequence[events.FoundWorker], now: float) -> list[Instruction]:
        """It is known who is there; those who may be in a world are waited for."""
        if self.begun:
            return []
        self._since = self._news = now
        past, remembered = self._past, {worker.worker_id: worker for worker in self._past.workers}
        late: list[Instruction] = []
        # Pods of workers that are gone are kept for their logs: an earlier master has dealt with these.
        there = {
            w.worker_id: w for w in found if not w.over or w.worker_id in remembered or w.worker_id >= past.next_id
        }
        for worker_id in sorted({*there, *remembered, *past.finished}):
            seen, known = there.get(worker_id), remembered.get(worker_id)
            record = _restore(seen or events.FoundWorker(worker_id), known, self._settings, now)
            if worker_id in past.finished:
                record.state = WorkerState.FINISHED if seen or known else WorkerState.COMPLETED
                record.deadline = None
            self._records[worker_id] = record
            if known and known.state in STARTING and not known.place and record.state is WorkerState.STARTING:
                late += [started(record)] if record.pid else []  # it was, while there was no master
            expected = record.ready or record.world_version or worker_id not in remembered
            if record.live and record.host and expected:
                self._awaited.add(worker_id)
        gone = remembered.keys() - there.keys()
        for worker_id in sorted(gone):
            known = remembered[worker_id]
            if known.state in STARTING and not known.place:  # it waited, and nobody has taken anything away
                cause, reason = ExitCause.DRAINED, "the master ended before it had a place"
            else:
                cause, reason = (
                    ExitCause.LOST,
                    "it was gone when the master started again, and nobody has seen why",
                )
            self.hold(events.WorkerExited(worker_id, cause, -1, reason), now)
        condemned = [r for r in self._records.of(WorkerState.KILLING) if r.worker_id not in gone]
        return [*late, *(KillWorker(record.worker_id, record.reason) for record in condemned)]

    def forgive(self, absence: float) -> None:
        """For so long the master could not hear or act."""
        self._news += absence

    def heard(self, worker_id: int, beat: Heartbeat, now: float) -> None:
        """A world that trains has lost nobody: its missing members are alive."""
        before, self._progress[worker_id] = self._progress.get(worker_id), beat.progress
        if beat.world_version and (not beat.waiting or beat.progress != before):
            self._news = now

    def hold(self, event: events.Event, now: float) -> None:
        match event:
            case events.FromWorker(worker_id, Hello() as hello):
                if worker_id in self._awaited:
                    self._awaited.discard(worker_id)
                    self._news = now
                self._set_connected(worker_id, connected=True)
                self._newest = max(self._newest, hello.world_version)
            case events.WorkerDisconnected(worker_id):
                self._set_connected(worker_id, connected=False)
            case events.FromWorker(_, Ask(left_world)):
                self._newest = max(self._newest, left_world)
            case events.WorkerExited(worker_id):
                self._awaited.discard(worker_id)
                self._set_connected(worker_id, connected=False)
        self.held.append(event)

    # ---- when it is over ----

    def is_over(self, now: float) -> bool:
        if self._since is None:
            return False
        given_up = now - self._news > self._settings.heartbeat_timeout and self._can_be_reached
        return not self._awaited or given_up or now - self._since > self._settings.recovery_timeout

    def missing(self, now: float) -> list[int]:
        """Those who have not come back in time."""
        return sorted(self._awaited) if self.is_over(now) else []

    def waited(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def report(self, now: float) -> Record:
        """What there is to say once it is over."""
        world, missing = self.world, self.missing(now)
        members = list(world.worker_ids) if world else []
        fields = {"world": world.version if world else 0, "members": members, "missing": missing}
        return Record("master_restarted", {**fields, "seconds": round(self.waited(now), 6)})

    @property
    def world(self) -> World | None:
        """That of the last save, unless somebody knows of a newer one.

        It may never have been announced; its members have asked for it, and will hear of it.
        """
        world = self._past.world
        return world if world and world.version >= self._newest else None

    @property
    def _can_be_reached(self) -> bool:
        """Whether those missing would have come if they could. A standby's node may know the address before theirs do."""
        connected = {record.worker_id for record in self._records.values() if record.connected}
        world = self.world
        members = world.worker_ids if world else connected if self._newest else ()
        return not connected.isdisjoint(members)

    def _set_connected(self, worker_id: int, *, connected: bool) -> None:
        if record := self._records.get(worker_id):
            self._records.connect(record, connected=connected)
