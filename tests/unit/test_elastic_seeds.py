"""What a script draws at random to split or shuffle its data is the same on all workers; a seed of its own stays."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from elasticdl.common.front_ends import python_path
from elasticdl.elastic.training.runtime import SEED, SEEDED, seed_if_unused, used_streams_kept

DRAWS = "import random; a = random.random(); import numpy.random; print(a, numpy.random.rand())"
CHILD = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
EXEC = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"


def drawn(*program, **env):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICDL_")}
    environ |= {"ELASTICDL_MASTER": "127.0.0.1:1", **python_path({}), **env}
    made = subprocess.run(
        [sys.executable, "-c", *program], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    return made.stdout


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
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])


@pytest.mark.usefixtures("_keep_streams")
def test_a_seed_of_the_scripts_own_stays():
    random.seed(SEED)
    np.random.seed(SEED)
    seed_if_unused(7)
    assert random.getstate() == random.Random(7).getstate()
    assert np.random.rand() == np.random.RandomState(7).rand()
    random.seed(3)
    np.random.seed(3)
    seed_if_unused(7)
    assert random.getstate() == random.Random(3).getstate()
    assert np.random.rand() == np.random.RandomState(3).rand()
    np.random.seed(SEED)
    np.random.rand()
    seed_if_unused(7)
    assert np.random.rand() == np.random.RandomState(SEED).rand(2)[1]


@pytest.mark.usefixtures("_keep_streams")
def test_init_leaves_keras_as_the_script_has_seeded_it():
    from elasticdl.elastic.keras.tensorflow_adapter import seed_keras
    from elasticdl.tensorflow import keras, tf

    keras.utils.set_random_seed(7)
    seed_keras(5)
    assert random.getstate() == random.Random(7).getstate()
    tf.random.set_seed(SEED)  # as at a worker's start
    seed_keras(5)
    assert random.getstate() == random.Random(5).getstate()
    assert tf.compat.v1.get_seed(0)[0] == 5


def test_init_leaves_torch_as_the_script_has_seeded_it():
    import torch

    from elasticdl.elastic.torch_kit.tensors import seed_torch

    with torch.random.fork_rng():
        torch.manual_seed(7)
        seed_torch(5)
        assert torch.initial_seed() == 7
        torch.seed()
        seed_torch(5)
        assert torch.initial_seed() == 5
        torch.manual_seed(SEED)
        seed_torch(5)
        assert torch.initial_seed() == 5


@pytest.mark.usefixtures("_keep_streams")
def test_what_a_worker_s_script_has_seeded_is_kept(monkeypatch):
    monkeypatch.setenv(SEEDED, "here")
    random.seed(3)
    np.random.seed(SEED)
    with used_streams_kept():
        random.seed(7)
        np.random.seed(7)
    assert random.getstate() == random.Random(3).getstate()
    assert np.random.rand() == np.random.RandomState(7).rand()
    monkeypatch.delenv(SEEDED)
    with used_streams_kept():
        random.seed(7)
    assert random.getstate() == random.Random(7).getstate()
