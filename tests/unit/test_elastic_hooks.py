"""Hooks on parameters in Lightning's manual optimization: called in each pass, as with DistributedDataParallel."""

import pytest
import torch
from elastic_kit import Board, in_threads
from test_elastic_lightning_manual import Member
from test_elastic_loop_scripts import mask

pytestmark = pytest.mark.filterwarnings("ignore")


def test_manual_optimization_calls_them_in_each_pass():
    batches = torch.randn(14, 12, 3, generator=torch.Generator().manual_seed(1))

    def train(workers):
        board = Board(workers)
        members = [Member(rank, board) for rank in range(workers)]
        for member in members:
            mask(torch.nn.ModuleList([member.first, member.second]))
        return in_threads(lambda each: each.train(batches)[0], members)

    (alone,) = train(1)
    for ours in train(2):
        torch.testing.assert_close(ours, alone)
