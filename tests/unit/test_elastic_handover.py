"""What a worker leaves behind: its state, if it may be the last to hold it, and the samples that it has trained on."""

import json

import numpy as np
import pytest
import torch
from elastic_kit import Board, Trainee
from session_kit import FakeMaster, alone

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.interruptions import Stopped
from elasticdl.elastic.core.plan import BatchPlan, BatchPolicy
from elasticdl.elastic.core.progress import Progress, StepPlan
from elasticdl.elastic.core.world import Member, World
from elasticdl.elastic.training.worker_files import Handover, SampleRecord

POLICY = BatchPolicy(20, None, 10)


WORLD = World(1, (Member(3, "h", 0, False),), 0)


def trainee(folder, session=None):
    """Its SIGTERM ends it at once; without ``session`` it is alone."""
    made = Trainee(0, Board(1), POLICY, joins=False, session=session or alone())
    made.context.handover = Handover(folder)
    return made


def under_master():
    return FakeMaster(WORLD).session


def leave_after(member, steps):
    def train():
        for batch in member.steps():
            if batch.plan.step == steps:
                member.context.session.post(p.Terminated("told to leave"))
            member.make_step(batch)
            member.state.commit()

    with pytest.raises(Stopped):
        member.context.run(train, member.state)


def test_the_next_goes_on_where_the_last_has_left(tmp_path):
    first, second, undisturbed = trainee(tmp_path, under_master()), trainee(tmp_path), trainee(tmp_path / "none")
    leave_after(first, 2)
    assert [path.name for path in tmp_path.glob("*")] == ["handover-0000000002"]
    for member in (second, undisturbed):
        member.context.run(lambda member=member: member.train(1), member.state)
    assert second.state.step == undisturbed.state.step == 3
    assert second.losses == undisturbed.losses[2:]
    for ours, theirs in zip(second.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    second.context.finish(step=3, epochs=1, metrics={})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_costs_nothing_but_is_told_of(tmp_path):
    master = FakeMaster(WORLD)
    leave_after(trainee(tmp_path / "missing", master.session), 1)
    (warning,) = master.notices("warning")
    assert "the state after step 1 leaves with its last worker" in warning["message"]


def test_whose_job_is_stopped_leaves_nothing(tmp_path):
    member = trainee(tmp_path)  # alone, SIGTERM is the end
    leave_after(member, 1)
    assert list(tmp_path.iterdir()) == []


def test_samples_that_count_are_recorded_where_they_are_numbers(tmp_path):
    record = SampleRecord(tmp_path, 3)
    plan = BatchPlan((7, np.int64(8), "nine"), (3, 0))
    parts = (plan.whole_run(0), plan.whole_run(1), *plan.mine(0, most=2))  # the second is another worker's
    record.begin(WORLD, StepPlan(1, 5, 3, Progress(), parts))
    record.close()
    assert json.loads((tmp_path / "worker-3.jsonl").read_text())["indices"] == [7, 8, 7, 8]
