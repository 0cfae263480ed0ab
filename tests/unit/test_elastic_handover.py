"""What a worker leaves behind that may be the last with the state."""

import pytest
import torch
from elastic_kit import Board, Trainee

from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.core.errors import Stopped
from elasticdl.elastic.session.membership import StandaloneMembership
from elasticdl.elastic.training.handover import Handover

POLICY = BatchPolicy(20, None, 10)


def trainee(folder, membership=None):
    made = Trainee(0, Board(1), POLICY)
    made.context.handover = Handover(folder)
    if membership is not None:
        made.context.membership = made.context._loop._membership = membership
    return made


class Drained(StandaloneMembership):
    """Told to leave at once: what it is told of is the end of this worker, not of the job."""

    def drain(self, reason):
        self._stopped = Stopped(reason, checkpoint=False, drained=True)


def leave_after(member, steps):
    def train():
        for batch in member.steps():
            if batch.plan.step == steps:
                member.context.membership.drain("told to leave")
            member.make_step(batch)
            member.state.commit()

    with pytest.raises(Stopped):
        member.context.run(train, member.state)


def test_the_next_goes_on_where_the_last_has_left(tmp_path):
    first, second, undisturbed = trainee(tmp_path, Drained()), trainee(tmp_path), trainee(tmp_path / "none")
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


def test_an_older_one_is_not_gone_back_to(tmp_path):
    first, second = trainee(tmp_path, Drained()), trainee(tmp_path)
    leave_after(first, 1)
    second.state.progress = first.state.progress.after(20)
    assert Handover(tmp_path).read(second.state) is None


def test_a_folder_that_can_not_be_written_costs_nothing_but_is_told_of(tmp_path, caplog):
    member = trainee(tmp_path / "missing", Drained())
    leave_after(member, 1)
    assert "the state after step 1 leaves with its last worker" in caplog.text


def test_whose_job_is_stopped_leaves_nothing(tmp_path):
    member = trainee(tmp_path)  # alone, SIGTERM is the end
    leave_after(member, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_can_not_be_written_is_warned_of_and_nothing_else(tmp_path, caplog):
    member = trainee(tmp_path, Drained())
    member.state.values["rule"] = lambda step: step  # no pickle can hold it; a full disk ends in a RuntimeError, too
    leave_after(member, 1)
    assert "the state after step 1 leaves with its last worker: " in caplog.text
    assert list(tmp_path.iterdir()) == []
