"""Run:AI's elasticity API: its numbers, what it refuses, and its examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import QUICK_KERAS

import elasticdl.elastic
from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPlan, BatchPolicy
from elasticdl.elastic.training.batch_shape import BatchShape, CurrentJob, make_policy

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "runai.md"

# Global batch, most samples on a GPU, GPUs; then what Run:AI's formula gave, and what ours gives.
ROWS = [
    ((256, 64, 3), (1, 85, 255), (2, 43)),
    ((127, 64, 1), (1, 127, 127), (2, 64)),
    ((128, 16, 3), (2, 21, 126), (3, 15)),
    ((100, 32, 1), (3, 33, 99), (4, 25)),
    ((256, 64, 5), (1, 51, 255), (1, 52)),
    ((256, 64, 6), (1, 42, 252), (1, 43)),
]


@pytest.mark.parametrize(("given", "theirs", "ours"), ROWS)
def test_where_run_ai_was_wrong(given, theirs, ours):
    batch, most, gpus = given
    steps = max(1, batch // (most * gpus))
    size = batch // (steps * gpus)
    assert (steps, size, steps * size * gpus) == theirs
    assert size > most or theirs[2] != batch
    numbers = BatchShape.of(BatchPolicy(batch, None, most), gpus, rank=0)
    assert (numbers.steps, numbers.batch_size) == ours
    equal = BatchPlan.equal(range(batch), gpus)
    plan = [[each.samples for each in equal.mine(rank, most)] for rank in range(gpus)]
    assert sum(map(sum, plan)) == batch
    assert max(map(max, plan)) == numbers.batch_size <= most
    assert max(map(len, plan)) == numbers.steps
    shown = f"| {batch}, {most}, {gpus} | {steps} | {size} | {theirs[2]} | {ours[0]} | {ours[1]} | {batch} |"
    assert shown in DOCUMENT.read_text()


def test_a_memory_bound_above_the_batch_never_matters():
    assert BatchShape.of(make_policy(100, None, 256), 3, 0) == BatchShape(1, 34, 100, 3, True)


class Context:
    """A worker whose world changes."""

    def __init__(self, under_master):
        self.under_master, self.policy = under_master, BatchPolicy(256, None, 64)
        self.size, self.rank = 1, 0


def test_the_numbers_follow_the_world_and_alone_the_gpus():
    context = Context(under_master=True)
    job = CurrentJob(context, gpus=8)
    assert job.numbers == BatchShape(4, 64, 256, 1, True)
    context.size, context.rank = 3, 2
    assert job.numbers == BatchShape(2, 43, 256, 3, False)
    alone = CurrentJob(Context(under_master=False), gpus=2)
    assert (alone.numbers.gpus, alone.numbers.steps) == (2, 2)
    assert alone.use_one_gpu() == 2
    assert (alone.numbers.gpus, alone.numbers.steps) == (1, 4)


def test_a_script_may_print_its_numbers_after_prepare():
    forbidden = []
    context = Context(under_master=True)
    context.divides_batches, context.has_world, context.forbid_steps = True, False, forbidden.append
    job = CurrentJob(context)
    assert job.number("steps") == 4
    assert len(forbidden) == 1, "an optimizer's step is of a loop that was not prepared"
    job.take_whole()
    assert job.number("steps") == 4
    assert len(forbidden) == 1


def test_before_init_there_are_no_numbers():
    with pytest.raises(UserError, match="init"):
        CurrentJob().numbers  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'step'"):
        elasticdl.elastic.step  # noqa: B018


def run(code, *arguments, **env):
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else []), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        check=False,
    )


KERAS_ERRORS = """
import keras, numpy as np
import elasticdl.elastic, elasticdl.elastic.keras as elastic
from elasticdl.common.errors import UserError

def told(words, call):
    try:
        call()
    except UserError as error:
        assert words in str(error) and "\\n" not in str(error), str(error)
    else:
        raise AssertionError(words)

built = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
told("init", lambda: elasticdl.elastic.steps)
told("init", lambda: elastic.models.Model(built))
told("gpus", lambda: elastic.init(8, 4, 0))
told("global_batch_size must be a whole number of at least 1, not 0", lambda: elastic.init(0, 4))
told("either", lambda: elastic.init())
elastic.init(8, 4)
told("called before", lambda: elastic.init(8, 4))
told("not built", lambda: elastic.models.Model(keras.Sequential([keras.layers.Dense(1)])))
model = elastic.models.Model(built)
x, y = np.ones((6, 2)), np.ones((6, 1))
told("compile()", lambda: model.fit(x, y))
told("without accumulation", lambda: model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse"))
model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
told("sum_over_batch_size", lambda: model.fit(x, y, sample_weight=np.ones(6)))
model.compile("sgd", "mse")
told("validation_steps", lambda: model.fit(x, y, validation_steps=2))
told("(workers=)", lambda: model.fit(x, y, workers=2))
class Tested(keras.Model):
    def call(self, inputs): return inputs
    def test_step(self, data): return {}
tested = Tested(); tested.build((None, 2)); tested = elastic.models.Model(tested); tested.compile("sgd", "mse")
told("fit(validation_data=): Tested has a test_step() of its own", lambda: tested.fit(x, x, validation_data=(x, x)))
history = model.fit(x, y, epochs=3, initial_epoch=1, verbose=0)
assert history.epoch == [1, 2], history.epoch
"""


def test_keras_mistakes_are_told_in_one_line():
    done = run(KERAS_ERRORS, **QUICK_KERAS)
    assert done.returncode == 0, done.stderr[-2000:]


TINY = ("--epochs", "1")
BATCHES = ("--global_batch_size", "4", "--max_gpu_batch_size", "2")


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("elastic/keras/mlp.py", ()),
        pytest.param("elastic/keras/vgg16.py", (*BATCHES, "--samples", "10"), marks=pytest.mark.slow),
        pytest.param("elastic/torch/cnn.py", (), marks=pytest.mark.slow),
        pytest.param(
            "ga/keras/vgg16.py", ("--batch_size", "2", "--steps", "2", "--samples", "10"), marks=pytest.mark.slow
        ),
        pytest.param("ga/keras/mlp.py", (), marks=pytest.mark.slow),
    ],
)
def test_the_examples_run(example, arguments):
    done = run("", str(ROOT / "examples" / example), *TINY, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in done.stdout
