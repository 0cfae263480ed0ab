"""A script that goes on from a checkpoint of its own, on a worker that comes later."""

from __future__ import annotations

import copy
import os
from unittest.mock import Mock

import pytest
import torch
from newcomer_kit import BATCHES, EPOCHS, STANDS, Member, late_of, train
from refusal_kit import refused

from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.runtime import ScriptRuntime


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
    ("stands", "read", "passed"), [(STANDS, 1, 2), (STANDS, 0, 6), ((0, 0), 1, 0), ((1, 0), 1, 0), ((0, 0), 0, 0)]
)
def test_a_newcomer_goes_on_from_what_the_script_has_written_after_an_epoch(stands, read, passed):
    """Or from its top, where it has found no file."""
    checkpoints = Checkpoints()
    member = Member(start=0)
    train(member, after=checkpoints.write)
    late = late_of(member, stands, before=checkpoints.read(read) if read else None, start=read)
    train(late, epochs=range(read, EPOCHS))
    assert late.joined_at == passed
    assert all(torch.equal(*each) for each in zip(late.model.parameters(), member.model.parameters(), strict=True))
    assert late.orders == {epoch: order for epoch, order in member.orders.items() if epoch in late.orders}
    assert late.host.finish().progress == member.host.finish().progress


def test_a_newcomer_whose_checkpoint_is_newer_than_what_it_was_told_asks_for_a_world_at_once():
    """The others evaluate still, before the next epoch begins."""
    checkpoints = Checkpoints()
    member = Member(start=0)
    train(member, after=checkpoints.write)
    late = late_of(member, stands=(0, BATCHES), before=checkpoints.read(1), start=1)
    train(late, epochs=range(1, EPOCHS))
    assert late.joined_at == 0
    assert late.host.finish().progress == member.host.finish().progress


def test_a_checkpoint_that_is_ahead_of_the_job_is_refused():
    member = Member(start=0)
    train(member)
    late = late_of(member, start=3)
    refused(r"start_epoch=3\) is ahead of the job, which stands in epoch 2", lambda: train(late, epochs=range(3, 5)))


def test_where_nobody_is_left_the_script_goes_on_from_its_own_checkpoint():
    checkpoints = Checkpoints()
    member = Member(start=0)
    train(member, after=checkpoints.write)
    anew = Member(before=checkpoints.read(1), start=1)
    train(anew, epochs=range(1, EPOCHS), after=checkpoints.write)
    ended = anew.host.finish().progress
    assert ended.epoch == EPOCHS
    for read in (0, 2):
        later = Member(join=anew.kept[-2], before=checkpoints.read(read) if read else None, start=read)
        train(later, epochs=range(read, EPOCHS))
        assert later.host.finish().progress == ended


@pytest.mark.parametrize("stands", [(EPOCHS - 1, 3), (0, 0)])
def test_a_script_with_an_empty_loop_is_in_the_job_until_the_others_end(stands):
    """It has read what was written after the last epoch. ``stands``: nothing is told while the job waits for workers."""
    checkpoints = Checkpoints()
    member = Member()
    train(member, after=checkpoints.write)
    late = Member(stands=stands, before=checkpoints.read(EPOCHS), start=EPOCHS)
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
    late = Member(stands=(EPOCHS - 1, 3), join=waits[0], before=checkpoints.read(EPOCHS), start=EPOCHS)
    assert late.host.finish().step == ended.step
    assert all(torch.equal(*each) for each in zip(late.model.parameters(), member.model.parameters(), strict=True))
