"""The records of a job's workers, and who is in which state, so that an event of one worker is not weighed by looking at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from elasticdl.master.state.states import LIVE, WorkerState
from elasticdl.master.state.worker_record import WorkerRecord


class Records(dict[int, WorkerRecord]):
    """By worker id. `move` and `connect` change the state and the session of a record that is in here, and nobody else does."""

    def __init__(self) -> None:
        super().__init__()
        # By state, and by whether the worker has a session.
        self._kept: dict[tuple[WorkerState, bool], dict[int, WorkerRecord]] = {
            (state, connected): {} for state in WorkerState for connected in (True, False)
        }

    def __setitem__(self, worker_id: int, record: WorkerRecord) -> None:
        if worker_id in self:
            del self[worker_id]
        super().__setitem__(worker_id, record)
        self._keep(record)

    def __delitem__(self, worker_id: int) -> None:
        self._drop(self[worker_id])
        super().__delitem__(worker_id)

    def clear(self) -> None:
        super().clear()
        for records in self._kept.values():
            records.clear()

    def move(self, record: WorkerRecord, state: WorkerState) -> None:
        """This record, which is in here, gets another state."""
        self._drop(record)
        record.state = state
        self._keep(record)

    def connect(self, record: WorkerRecord, *, connected: bool) -> None:
        """The worker of this record, which is in here, has a session from now on, or has none."""
        self._drop(record)
        record.connected = connected
        self._keep(record)

    def of(self, *states: WorkerState, connected: bool | None = None) -> list[WorkerRecord]:
        """By id."""
        return sorted(self.each_of(*states, connected=connected), key=attrgetter("worker_id"))

    def each_of(self, *states: WorkerState, connected: bool | None = None) -> Iterator[WorkerRecord]:
        """In no order that means anything. ``connected``: with a session, or without one; None: all."""
        return chain.from_iterable(kept.values() for kept in self._chosen(states, connected))

    def count(self, *states: WorkerState, connected: bool | None = None) -> int:
        return sum(map(len, self._chosen(states, connected)))

    def _chosen(self, states: tuple[WorkerState, ...], connected: bool | None) -> list[dict[int, WorkerRecord]]:
        sessions = (True, False) if connected is None else (connected,)
        return [self._kept[state, session] for state in states for session in sessions]

    def _keep(self, record: WorkerRecord) -> None:
        self._kept[record.state, record.connected][record.worker_id] = record

    def _drop(self, record: WorkerRecord) -> None:
        del self._kept[record.state, record.connected][record.worker_id]

    def lingering(self) -> list[WorkerRecord]:
        members = self.each_of(WorkerState.MEMBER, WorkerState.REJOINING)
        return [record for record in members if record.waits_for_successor]

    @property
    def live(self) -> int:
        """Workers that are there, or on their way, and not leaving."""
        return self.count(*LIVE) - len(self.lingering())
