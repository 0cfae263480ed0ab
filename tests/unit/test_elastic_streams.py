"""What is drawn apart leaves the script's random streams as they are."""

import random

import numpy as np
import torch

from elasticdl.elastic.torch_kit.tensors import seed_generators, streams_apart


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
