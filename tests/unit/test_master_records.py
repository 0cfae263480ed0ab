"""Who is in which state: what is kept of it agrees with the records, whatever was done to them."""

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.rules.suspicions import TABLE
from elasticdl.master.state import events as e
from elasticdl.master.state.records_by_state import Records
from elasticdl.master.state.states import LIVE, WorkerState
from elasticdl.master.state.suspicion import SuspicionKind
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord

STATES = st.sampled_from(WorkerState)
DEEDS = st.lists(st.tuples(st.sampled_from(["put", "move", "drop", "linger", "clear"]), st.integers(0, 5), STATES))


@given(DEEDS)
def test_it_agrees_with_a_look_at_all(deeds):
    records = Records()
    for deed, worker_id, state in deeds:
        record = records.get(worker_id)
        if deed == "put":
            records[worker_id] = WorkerRecord(worker_id, "", state)
        elif deed == "clear" and worker_id == 0:
            records.clear()
        elif record and deed == "move":
            records.move(record, state)
        elif record and deed == "drop":
            del records[worker_id]
        elif record and deed == "linger":
            record.waits_for_successor = record.state in (WorkerState.MEMBER, WorkerState.REJOINING)
        for record in records.values():  # as the table of states has it
            record.waits_for_successor = record.waits_for_successor and record.state in (
                WorkerState.MEMBER,
                WorkerState.REJOINING,
            )
        everybody = [records[worker_id] for worker_id in sorted(records)]
        for states in [(each,) for each in WorkerState] + [LIVE]:
            there = [record for record in everybody if record.state in states]
            assert records.of(*states) == there
            assert records.count(*states) == len(there)
        assert records.live == sum(record.live for record in everybody)
        assert records.lingering() == [record for record in everybody if record.waits_for_successor]


def test_an_event_of_one_worker_is_not_weighed_by_a_look_at_all():
    """Else a thousand workers that start cost a million looks."""
    workers = 400
    job = Job(Settings(WorkerRange(minimum=workers, maximum=workers)))
    looks = 0

    class Counted(Records):
        def values(self):
            nonlocal looks
            looks += 1
            return super().values()

    records = Counted()
    for part in (job._workers, job._workers.rendezvous, job._workers.transitions, job._workers.fleet):
        for name in ("records", "_records"):
            if hasattr(part, name):
                setattr(part, name, records)
    job._workers.liveness._records = records
    for event in (e.WorkersFound(()), e.Tick()):
        job.step(event, 0.0)
    looks = 0
    for worker_id in range(workers):
        for event in (
            e.WorkerPlaced(worker_id, "h", 1),
            e.WorkerConnected(worker_id, "h", 1),
            e.JoinRequested(worker_id, 0, 0, has_state=False),
            e.HeartbeatReceived(worker_id, 0, 0, 1, waiting=False),
        ):
            job.step(event, 0.0)
    assert job.view().world_version == 1
    assert looks <= 4


def test_there_is_a_row_for_each_kind_of_suspicion():
    assert TABLE.keys() == set(SuspicionKind)
