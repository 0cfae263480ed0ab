"""What is so in the cores of master and workers after every step, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elasticdl.elastic.core import training_step as worker
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import DONE, IN_WORLD, LEAVING, LIVE, Phase, WorkerState
from elasticdl.master.core.worker_record import WorkerRecord

_S = WorkerState
_UNHURRIED = (*DONE, _S.STANDBY, _S.EXCLUDED, *IN_WORLD)


class InvariantError(AssertionError):
    """A mistake in the core."""


def check_job(job: Job) -> None:
    """
    Raises:
        InvariantError: one does not hold; its sentence, and of whom it does not.
    """
    for record in job.records.values():
        for sentence, holds in OF_WORKERS.items():
            if not holds(record, job):
                raise InvariantError(f"{sentence}: not so of {record}")
    for sentence, contradicted in OF_THE_JOB.items():
        if wrong := list(contradicted(job, job.phase)):
            raise InvariantError(f"{sentence}: not so of {wrong}")


def _rank_of(record: WorkerRecord, job: Job) -> int:
    """In the present world; -1 if it was never in it."""
    world = job.rendezvous.world
    return world.worker_ids.index(record.worker_id) if world and record.world_version == world.version else -1


OF_WORKERS: Mapping[str, Callable[[WorkerRecord, Job], bool]] = {
    "a record lies under its worker's id, which is below the next id": lambda r, job: (
        job.records[r.worker_id] is r and r.worker_id < job.fleet.next_id
    ),
    "a worker whose process is gone has no record unless it has finished": lambda r, job: r.state is not _S.GONE,
    "who is in the world, or left it for the next, has its rank there": lambda r, job: (
        r.state not in IN_WORLD or _rank_of(r, job) == r.rank
    ),
    "who waits for a world has asked for one": lambda r, job: r.ready or r.state not in (_S.STANDBY, _S.REJOINING),
    "who has to leave has a time to do so": lambda r, job: (
        r.deadline is not None or not (r.waits_for_successor or r.state in LEAVING)
    ),
    "who trains, waits or has finished has no deadline unless it leaves": lambda r, job: (
        r.deadline is None or r.waits_for_successor or r.state not in _UNHURRIED
    ),
    "only one who does not leave yet waits for its successor": lambda r, job: (
        not r.waits_for_successor or r.state in LIVE
    ),
    "silence means nothing of who has finished, failed or was given up": lambda r, job: (
        r.pulse is None or r.state in (*LIVE, _S.DRAINING)
    ),
    "a member of a broken world has a session": lambda r, job: (
        r.state is not _S.MEMBER or r.connected or not job.rendezvous.broken or job.recovery is not None
    ),
    "in a job that ends nobody works on": lambda r, job: r.state not in LIVE or not job.ending.dismissed,
}


def _lost_members(job: Job, phase: Phase) -> Iterable[object]:
    rendezvous = job.rendezvous
    if rendezvous.world is None or rendezvous.change or job.ending.outcome or not job.records.count(_S.MEMBER):
        return ()
    inside = {r.worker_id for r in job.records.each_of(*IN_WORLD, *DONE)}
    return set(rendezvous.world.worker_ids) - inside


def _idle(job: Job, phase: Phase) -> Iterable[object]:
    waits = job.recovery is not None or job.ending.outcome or job.fleet.next_id == 0 or job.fleet.holding
    waits = waits or job.size.most(job.limits)[0] == 0
    return () if waits or not job.all_gone() else (phase,)


OF_THE_JOB: Mapping[str, Callable[[Job, Phase], Iterable[object]]] = {
    "as long as no change is under way, everybody in the world is alive in it or has finished": _lost_members,
    "no version is higher than the newest": lambda job, phase: (
        r.world_version for r in job.records.values() if r.world_version > job.rendezvous.version
    ),
    "the job is over only if that was decided and everybody is gone": lambda job, phase: (
        (phase,) if phase.final and not (job.ending.outcome and job.all_gone()) else ()
    ),
    "a job whose end is not decided has a worker, or one that will be launched": _idle,
}


def check_worker(core: WorkerCore) -> None:
    """
    Raises:
        InvariantError: one does not hold; its sentence.
    """
    for sentence, holds in OF_A_WORKER.items():
        if not holds(core):
            raise InvariantError(f"{sentence}: not so of worker {core.worker_id}, {core.state}")


_W = worker.WorkerState
OF_A_WORKER: Mapping[str, Callable[[WorkerCore], bool]] = {
    "a request to join is open exactly while the worker waits": lambda core: (
        (core.request is not None) == (core.state is _W.WAITING)
    ),
    "a worker that asks for a world has no batch in hand, and nothing unsaved": lambda core: (
        core.state not in (_W.WAITING, _W.CONNECTING)
        or not (core.position.batch or core.position.unsaved or core.position.is_stale)
    ),
    "what is saved is never ahead of where training stands": lambda core: (
        core.position.saved.step <= core.position.progress.step
    ),
    "an unsaved step is saved in its place": lambda core: (
        not core.position.unsaved or core.position.saved.step == core.position.progress.step
    ),
    "who trains holds the state": lambda core: (
        core.state not in worker.IN_TRAINING or core.position.has_state or not core.under_master
    ),
    "a worker that is to leave does not wait": lambda core: (
        core.state is not _W.WAITING or not (core.stopping or core.lost)
    ),
    "a last word is the end": lambda core: core.last_word is None or core.state is _W.GONE,
    "no world is entered that was left": lambda core: (
        core.state not in worker.IN_WORLD
        or not core.under_master
        or core.world.version > core.left_version
        or core.state is _W.COMPLETE
    ),
}
