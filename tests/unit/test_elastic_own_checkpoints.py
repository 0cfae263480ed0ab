"""A script that goes on from a checkpoint of its own, on a worker that comes later."""

from __future__ import annotations

import copy
import os
from unittest.mock import Mock

import pytest
import torch
from newcomer_kit import EPOCHS, STANDS, Member, late_of, train
from refusal_kit import refused
from session_kit import FakeMaster

from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.torch.approach import mark_of
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.runtime import ScriptRuntime
from elasticdl.proto import elasticdl_pb2 as pb


class Checkpoints:
    """Of a script that writes one at the end of each epoch, and goes on from it."""

    def __init__(self):
        self.written = []

    def write(self, member):
        self.written.append(copy.deepcopy((member.model.state_dict(), member.optimizer.state_dict())))

    def read(self, epochs, parts=2):
        """As that of the first epochs; to be called at a script's beginning."""

        def load(member):
            read = self.written[epochs - 1][:parts]
            for one, state in zip((member.model, member.optimizer), read, strict=False):
                one.load_state_dict(copy.deepcopy(state))

        return load


@pytest.mark.parametrize(
    ("stands", "read", "told", "passed"), [(STANDS, 1, True, 2), ((0, 0), 1, False, 0), ((1, 0), 1, False, 0)]
)
def test_a_newcomer_goes_on_from_what_the_script_has_written_after_an_epoch(stands, read, told, passed):
    """``told``: whether the master knows of that epoch; else only the state does, that the others send."""
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    late = late_of(member, stands if told else (0, 0), before=checkpoints.read(read))
    marks = member.host.participant.position.marks
    assert list(marks) == [0, 1, 2]
    assert late.job.session.jobs_marks() == {}
    late.job.session._jobs_marks = marks if told else {}
    train(late, epochs=range(read, EPOCHS))
    assert late.joined_at == passed
    assert all(torch.equal(*each) for each in zip(late.model.parameters(), member.model.parameters(), strict=True))
    assert late.orders == {epoch: order for epoch, order in member.orders.items() if epoch in late.orders}
    assert late.host.finish().progress == member.host.finish().progress


def test_parameters_without_the_optimizers_state_are_refused_as_the_loop_may_begin_anywhere():
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    late = late_of(member, before=checkpoints.read(1, parts=1))
    late.job.session._jobs_marks = member.host.participant.position.marks
    refused("parameters that this job had after epoch 1, and not the optimizer", lambda: train(late))


def test_a_newcomer_whose_checkpoint_is_newer_than_all_that_it_was_told_asks_for_a_world_at_once():
    """The others evaluate still, before the next epoch begins."""
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    late = late_of(member, stands=(0, 4), before=checkpoints.read(1))
    late.job.session._jobs_marks = {0: member.host.participant.position.marks[0]}
    train(late, epochs=range(1, EPOCHS))
    assert late.joined_at == 0
    assert late.host.finish().progress == member.host.finish().progress


def test_a_newcomer_that_was_told_too_little_of_the_epochs_is_started_again():
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    late = late_of(member, before=checkpoints.read(1))
    refused("another optimizer's state than where the job began", lambda: train(late, epochs=range(1, EPOCHS)))


def test_where_nobody_is_left_the_script_goes_on_from_its_own_checkpoint():
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    anew = Member(before=checkpoints.read(1))
    anew.job.session._jobs_marks = member.host.participant.position.marks
    train(anew, epochs=range(1, EPOCHS), after=checkpoints.write)
    assert list(anew.host.participant.position.marks) == [0, 1]
    later = Member(join=anew.kept[-2], before=checkpoints.read(4))
    train(later, epochs=range(2, EPOCHS))
    assert later.host.finish().progress == anew.host.finish().progress


def test_an_epoch_that_has_changed_no_parameters_leaves_open_where_the_loop_begins():
    checkpoints = Checkpoints()

    def stand_still(member):
        checkpoints.write(member)
        member.optimizer.param_groups[0]["lr"] = 0.0

    member = Member()
    train(member, after=stand_still)
    late = Member(stands=(2, 1), join=member.kept[9], before=checkpoints.read(2))
    late.job.session._jobs_marks = member.host.participant.position.marks
    refused("had after epoch 1 and still had after epoch 2", lambda: train(late, epochs=range(2, EPOCHS)))


def test_complex_parameters_have_a_mark():
    parameter = torch.nn.Parameter(torch.tensor([3.0 + 4.0j]))
    assert mark_of([torch.optim.SGD([parameter], lr=0.1)]) == 5.0


def test_a_worker_that_goes_on_from_a_kept_state_tells_its_marks_at_once():
    """And not with the next epoch: a worker that comes before reads a checkpoint which the master knows nothing of."""
    member = Member()
    train(member)
    late = late_of(member, stands=(0, 0))
    train(late, epochs=range(2))
    marks = member.host.participant.position.marks
    told = late.job.session._stream.notices("epoch_began")
    assert told == [{"epoch": 1, "marks": {str(epoch): marks[epoch] for epoch in (0, 1)}}]


@pytest.mark.parametrize("stands", [(EPOCHS - 1, 3), (0, 0)])
def test_a_script_with_an_empty_loop_is_in_the_job_until_the_others_end(stands):
    """It has read what was written after the last epoch. ``stands``: nothing is told while the job waits for workers."""
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    late = Member(stands=stands, before=checkpoints.read(EPOCHS))
    late.job.join = Mock(side_effect=Stopped("the job ends", checkpoint=False))
    runtime = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)
    runtime._context, runtime._pid = late.job, os.getpid()
    runtime.train_in_place(late.host.finish)
    runtime._end()
    late.job.join.assert_called_once()


def test_a_script_with_an_empty_loop_ends_with_one_that_waits_at_its_end():
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    waits = []
    member.job.end = lambda state: waits.append(copy.deepcopy(state.sent()))
    ended = member.host.finish()
    late = Member(stands=(EPOCHS - 1, 3), join=waits[0], before=checkpoints.read(EPOCHS))
    assert late.host.finish().step == ended.step
    assert all(torch.equal(*each) for each in zip(late.model.parameters(), member.model.parameters(), strict=True))


def test_the_master_is_told_the_marks_that_it_does_not_know():
    master = FakeMaster()
    session = master.session
    session.receive(pb.MasterMessage(welcome=pb.Welcome(epoch=2, epoch_steps=1, marks={0: 2.5, 1: 2.75})))
    assert session.jobs_marks() == {0: 2.5, 1: 2.75}
    session.tell_marks({0: 2.5, 1: 2.75})
    session.tell_marks({0: 2.5, 1: 3.0, 2: 3.5})
    session.tell_marks({1: 3.0, 2: 3.5})
    assert master.notices("epoch_began") == [{"epoch": 2, "marks": {"1": 3.0, "2": 3.5}}]


def test_of_a_job_that_begins_anew_the_master_is_told_what_it_has_known_of_the_one_before():
    master = FakeMaster()
    master.session.receive(pb.MasterMessage(welcome=pb.Welcome(epoch=2, marks={0: 2.5, 1: 2.75})))
    master.session.tell_marks({0: 2.5})
    master.session.tell_marks({0: 2.5, 1: 2.75})
    assert master.notices("epoch_began") == [{"epoch": 0, "marks": {"0": 2.5}}, {"epoch": 1, "marks": {"1": 2.75}}]
