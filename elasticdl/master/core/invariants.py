"""What is so after every step of a job, whatever happened: each with its sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elasticdl.master.core.ending import Ending
from elasticdl.master.core.fleet import Fleet
from elasticdl.master.core.lifecycle import LIVE, WorkerState
from elasticdl.master.core.record import WorkerRecord
from elasticdl.master.core.rendezvous import Rendezvous
from elasticdl.master.core.values import Phase

_S = WorkerState
_IN_WORLD = (_S.MEMBER, _S.REJOINING)


class InvariantError(AssertionError):
    """A mistake in the core."""


@dataclass(frozen=True, slots=True)
class Core:
    records: Mapping[int, WorkerRecord]
    rendezvous: Rendezvous
    fleet: Fleet
    ending: Ending
    phase: Phase
    recovering: bool

    def those(self, wrong: Callable[[WorkerRecord], bool]) -> list[WorkerRecord]:
        return [record for record in self.records.values() if wrong(record)]

    @property
    def version(self) -> int:
        return self.rendezvous.world.version if self.rendezvous.world else 0


def check(core: Core) -> None:
    """
    Raises:
        InvariantError: one does not hold; the sentence, and of whom.
    """
    for sentence, violations in INVARIANTS.items():
        if wrong := list(violations(core)):
            raise InvariantError(f"{sentence}: not so of {wrong}")


def _members_elsewhere(core: Core) -> Iterable[object]:
    ranks = {id_: rank for rank, id_ in enumerate(core.rendezvous.world.worker_ids)} if core.rendezvous.world else {}
    return core.those(
        lambda r: r.state in _IN_WORLD and (r.world_version != core.version or ranks.get(r.worker_id) != r.rank)
    )


def _members_without_record(core: Core) -> Iterable[object]:
    """They may be gone, but then the others leave their world."""
    if core.rendezvous.world is None or core.rendezvous.change or not core.rendezvous.active_members():
        return []
    inside = (*_IN_WORLD, _S.FINISHED, _S.COMPLETED)
    known = {record.worker_id for record in core.records.values() if record.state in inside}
    return [] if core.ending.outcome else set(core.rendezvous.world.worker_ids) - known


def _stalled(core: Core) -> Iterable[object]:
    undecided = core.ending.outcome is None and not core.recovering and core.fleet.next_id > 0
    under_way = core.those(lambda r: r.state is not _S.COMPLETED) or core.fleet.crashes.holding
    return ["the job"] if undecided and not under_way else []


# By sentence, what contradicts it.
INVARIANTS: Mapping[str, Callable[[Core], Iterable[object]]] = {
    "a record lies under its worker's id, which is below the next id": lambda c: (
        key for key, r in c.records.items() if key != r.worker_id or key >= c.fleet.next_id
    ),
    "a worker whose process is gone has no record unless it has finished": lambda c: c.those(
        lambda r: r.state is _S.GONE
    ),
    "who is in the world, or left it for the next, has its rank there": _members_elsewhere,
    "as long as no change is under way, everybody in the world is alive in it or has finished": _members_without_record,
    "the newest version is at least that of the present world": lambda c: [c.version][
        : c.version > c.rendezvous.version
    ],
    "who waits for a world has asked for one": lambda c: c.those(
        lambda r: r.state in (_S.STANDBY, _S.REJOINING) and not r.ready
    ),
    "who has to leave has a time to do so": lambda c: c.those(
        lambda r: r.deadline is None and (r.lingers or r.state in (_S.DRAINING, _S.FAILED))
    ),
    "who has finished, waits, or trains has no deadline unless it leaves": lambda c: c.those(
        lambda r: (
            r.deadline is not None
            and not r.lingers
            and r.state in (_S.FINISHED, _S.COMPLETED, _S.STANDBY, _S.REJOINING, _S.MEMBER, _S.EXCLUDED)
        )
    ),
    "only one who is in the world, or between two, lingers": lambda c: c.those(
        lambda r: r.lingers and r.state not in _IN_WORLD
    ),
    "silence means nothing of who has finished, failed or was given up": lambda c: c.those(
        lambda r: r.pulse is not None and r.state not in (*LIVE, _S.DRAINING)
    ),
    "a member of a broken world has a session": lambda c: c.those(
        lambda r: c.rendezvous.broken and r.state is _S.MEMBER and not (r.connected or c.recovering or c.ending.outcome)
    ),
    "a job that ends has nobody who works on": lambda c: c.those(lambda r: c.ending.dismissed and r.state in LIVE),
    "the job is over only if that was decided and everybody is gone": lambda c: (
        [c.phase]
        if c.phase.final and not (c.ending.outcome and all(r.state is _S.COMPLETED for r in c.records.values()))
        else []
    ),
    "a job whose end is not decided has a worker, or one that will be launched": _stalled,
}
