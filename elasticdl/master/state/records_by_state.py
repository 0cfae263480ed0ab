"""The records of a job's workers, and who is in which state, so that an event of one worker is not weighed by looking at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from elasticdl.master.state.states import LIVE, WorkerState
from elasticdl.master.state.worker_record import WorkerRecord


class Records(dict[int, WorkerRecord]):
    """By worker id. The state of a record that is in here is changed by `move`, and by nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self._by_state: dict[WorkerState, dict[int, WorkerRecord]] = {state: {} for state in WorkerState}

    def __setitem__(self, worker_id: int, record: WorkerRecord) -> None:
        if worker_id in self:
            del self[worker_id]
        super().__setitem__(worker_id, record)
        self._by_state[record.state][worker_id] = record

    def __delitem__(self, worker_id: int) -> None:
        del self._by_state[self[worker_id].state][worker_id]
        super().__delitem__(worker_id)

    def clear(self) -> None:
        super().clear()
        for records in self._by_state.values():
            records.clear()

    def move(self, record: WorkerRecord, state: WorkerState) -> None:
        """This record, which is in here, gets another state."""
        del self._by_state[record.state][record.worker_id]
        record.state = state
        self._by_state[state][record.worker_id] = record

    def of(self, *states: WorkerState) -> list[WorkerRecord]:
        """By id."""
        return sorted(self.each_of(*states), key=attrgetter("worker_id"))

    def each_of(self, *states: WorkerState) -> Iterator[WorkerRecord]:
        """In no order that means anything."""
        return chain.from_iterable(self._by_state[state].values() for state in states)

    def count(self, *states: WorkerState) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def lingering(self) -> list[WorkerRecord]:
        return [record for record in self.of(WorkerState.MEMBER, WorkerState.REJOINING) if record.waits_for_successor]

    @property
    def live(self) -> int:
        """Workers that are there, or on their way, and not leaving."""
        return self.count(*LIVE) - len(self.lingering())
