"""What the order of a loader's samples is drawn from, and what a script draws: on all workers the same."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from elastic_kit import make_data
from torch.utils.data import DataLoader

from elasticdl.common.front_ends import python_path
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.tensors import seed_torch
from elasticdl.elastic.training.runtime import SEED, SEEDED, seed_if_unused, used_streams_kept

IN_PROCESSES = {"num_workers": 1, "multiprocessing_context": "fork", "shuffle": True}


@pytest.mark.parametrize("is_iterated", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {**IN_PROCESSES, "persistent_workers": True},  # draws one seed for all epochs
        IN_PROCESSES,
        {"drop_last": True, "shuffle": True, "generator": torch.Generator()},
        {"sampler": torch.utils.data.WeightedRandomSampler(torch.ones(18), 15)},
    ],
)
def test_the_order_is_drawn_as_by_torch(options, is_iterated):
    data = make_data(18)

    def loaders():
        torch.manual_seed(0)
        options.get("generator", torch.Generator()).manual_seed(7)
        loader = DataLoader(data, 4, **options)
        if is_iterated:
            list(loader)
        return loader

    plain = loaders()
    theirs = [[x for x, _ in plain] for _ in range(3)]
    batches = OwnLoader(loaders())
    ours = [[data[batch.indices][0] for batch in batches.of_epoch(epoch)] for epoch in range(3)]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# -- what a script draws to split or shuffle its data; a seed of its own stays --

DRAWS = "import random; a = random.random(); import numpy.random; print(a, numpy.random.rand())"
CHILD = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
EXEC = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"


def drawn(*program, **env):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICDL_")}
    environ |= {"ELASTICDL_MASTER": "127.0.0.1:1", **python_path({}), **env}
    command = [sys.executable, "-c", *program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout


def test_workers_draw_alike_and_their_children_do_not():
    expected = f"{random.Random(SEED).random()} {np.random.RandomState(SEED).rand()}\n"
    assert drawn(DRAWS) == expected
    assert drawn(EXEC, DRAWS) == expected  # as a launcher that becomes the script
    assert drawn(CHILD, DRAWS) != drawn(CHILD, DRAWS)
    assert drawn(DRAWS, ELASTICDL_CONNECTED="127.0.0.1:1") != expected  # a child of a worker
    assert drawn(DRAWS, ELASTICDL_MASTER="") != expected  # without a job


@pytest.mark.parametrize(
    ("framework", "seed", "draw"),
    [
        ("torch", "manual_seed", "rand(2).tolist()"),
        ("tensorflow", "random.set_seed", "random.uniform([2]).numpy().tolist()"),
    ],
)
def test_workers_draw_alike_from_their_framework(framework, seed, draw):
    """As `random_split` does, on which data each of them trains."""
    program = f"import {framework} as f; first = f.{draw}; f.{seed}({SEED}); print(first == f.{draw})"
    assert drawn(program) == "True\n"


@pytest.fixture
def _keep_streams():
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])


def seed_both(seed):
    random.seed(seed)
    np.random.seed(seed)


def require_seeds(of_random, of_numpy):
    assert random.getstate() == random.Random(of_random).getstate()
    assert np.random.rand() == np.random.RandomState(of_numpy).rand()


@pytest.mark.usefixtures("_keep_streams")
@pytest.mark.parametrize(("scripts", "then"), [(SEED, 7), (3, 3)])
def test_a_seed_of_the_scripts_own_stays(scripts, then):
    seed_both(scripts)
    seed_if_unused(7)
    require_seeds(then, then)
    seed_if_unused(9)
    assert np.random.rand() == np.random.RandomState(then).rand(2)[1], "a stream that was drawn from stays, too"


@pytest.mark.usefixtures("_keep_streams")
def test_init_leaves_a_framework_as_the_script_has_seeded_it():
    from elasticdl.elastic.keras.tensorflow_adapter import seed_keras
    from elasticdl.tensorflow import keras, tf

    keras.utils.set_random_seed(7)
    seed_keras(5)
    assert random.getstate() == random.Random(7).getstate()
    tf.random.set_seed(SEED)  # as at a worker's start
    seed_keras(5)
    assert random.getstate() == random.Random(5).getstate()
    assert tf.compat.v1.get_seed(0)[0] == 5
    for seeds, kept in ((lambda: torch.manual_seed(7), 7), (torch.seed, 5), (lambda: torch.manual_seed(SEED), 5)):
        seeds()
        seed_torch(5)
        assert torch.initial_seed() == kept


@pytest.mark.usefixtures("_keep_streams")
@pytest.mark.parametrize(("environ", "kept"), [({SEEDED: "here"}, 3), ({}, 7)])
def test_what_a_worker_s_script_has_seeded_is_kept(monkeypatch, environ, kept):
    monkeypatch.delenv(SEEDED, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    random.seed(3)
    np.random.seed(SEED)
    with used_streams_kept():
        seed_both(7)
    require_seeds(kept, 7)
