"""What the order of a loader's samples is drawn from, what is drawn apart, and stand-ins for batches."""

import random

import numpy as np
import pytest
import torch
from elastic_kit import make_data
from torch.utils.data import DataLoader

from elasticdl.elastic.torch_kit.own_loader import Draws, OwnLoader, StandIn
from elasticdl.elastic.torch_kit.tensors import seed_generators, streams_apart


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("is_iterated", [True, False])
def test_seeds_are_drawn_as_by_torch(persistent, is_iterated):
    """A loader whose processes stay draws one for all epochs."""

    def loaders():
        torch.manual_seed(0)
        loader = DataLoader(
            make_data(16), 4, shuffle=True, num_workers=1, persistent_workers=persistent, multiprocessing_context="fork"
        )
        if is_iterated:
            list(loader)
        return loader

    theirs, plain = [], loaders()
    for _ in range(3):
        theirs.append([x for x, _ in plain])
    data, batches = make_data(16), OwnLoader(loaders())
    for epoch in range(3):
        ours = [data[batch.indices][0] for batch in batches.of_epoch(epoch)]
        assert all(map(torch.equal, ours, theirs[epoch]))


def test_a_newcomer_has_drawn_a_seed_if_the_others_have():
    def draws():
        loader = DataLoader(make_data(16), num_workers=1, persistent_workers=True)
        return Draws(loader)

    ours, theirs = draws(), draws()
    theirs.draw_seed()
    ours.restore(theirs.capture())
    state = torch.get_rng_state()
    ours.draw_seed()
    assert torch.equal(state, torch.get_rng_state())


def test_a_stand_in_is_as_at_first_however_the_script_has_changed_it():
    stand_in = StandIn([torch.ones(3), {"name": torch.zeros(2), "text": ["a"]}])
    first, _ = stand_in.take()
    first.add_(1)
    first, others = stand_in.take()
    assert torch.equal(first, torch.ones(3))
    others.clear()
    again, others = stand_in.take()
    assert again.data_ptr() == first.data_ptr(), "nothing is copied"
    assert others["text"] == ["a"]


def test_where_no_gpu_is_used_none_is_counted_in_each_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("it takes a quarter of a millisecond"))
    with streams_apart():
        torch.rand(1)


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_what_is_drawn_apart_is_seeded_also_within_another_and_the_streams_go_on():
    expected = []
    for apart in (False, True):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        drawn = [draw()]
        if apart:
            with streams_apart():
                seed_generators(7)
                within = [draw()]
                with streams_apart():
                    seed_generators(7)
                    assert draw() == within[0]
                within.append(draw())
            with streams_apart():
                seed_generators(7)
                assert [draw(), draw()] == within
        expected.append([*drawn, draw()])
    assert expected[0] == expected[1]
