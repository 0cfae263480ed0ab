"""What accumulation is for both frameworks: ``steps`` and ``samples`` as arguments, and what it needs besides the framework."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import pytest
import tensorflow as tf
import torch
from refusal_kit import refused

from elasticdl.common.errors import ArgumentError
from elasticdl.ga.keras import optimizers
from elasticdl.ga.torch import optim

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


class TorchKind:
    """An accumulating optimizer of one parameter, and how it is handed gradients."""

    kind, plain, ours = torch.optim.SGD, optim.Optimizer, optim.SGD

    def __init__(self):
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.given = {"params": [self.parameter], "lr": 0.25}
        self.optimizer = self.ours(STEPS, **self.given)

    def apply(self, samples=None):
        self.parameter.sum().backward()
        self.optimizer.step(samples=samples)

    def rate(self, optimizer):
        return optimizer.param_groups[0]["lr"]


class KerasKind:
    kind, plain, ours = keras.optimizers.SGD, optimizers.Optimizer, optimizers.SGD

    def __init__(self):
        self.given = {"learning_rate": 0.25}
        self.optimizer = self.ours(STEPS, **self.given)
        self.variable = keras.Variable(1.0)

    def apply(self, samples=None):
        self.optimizer.apply([tf.constant(1.0)], [self.variable], samples=samples)

    def rate(self, optimizer):
        return float(optimizer.learning_rate)


@pytest.fixture(params=[TorchKind, KerasKind], ids=["torch", "keras"])
def framework(request):
    return request.param()


def test_the_ways_to_give_steps(framework):
    positional = framework.given.values()
    made = [
        framework.ours(5, *positional),
        framework.ours(*positional, steps=5),
        framework.ours(steps=5, **framework.given),
        framework.plain(framework.kind(**framework.given), 5),
        framework.plain(framework.kind(**framework.given), steps=5),
    ]
    assert {(each.steps, framework.rate(each)) for each in made} == {(5, 0.25)}


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, "at least 1, not 0"),
        (2.0, "a whole number of at least 1, not 2.0"),
        (True, "not True"),
        ("4", "not '4'"),
        (None, "not None"),
        (SimpleNamespace(), "not a SimpleNamespace"),
    ],
)
def test_steps_that_make_no_sense(framework, steps, text):
    for call in (
        lambda: framework.plain(framework.kind(**framework.given), steps),
        lambda: framework.ours(steps, **framework.given),
        lambda: framework.ours(steps=steps, **framework.given),
        lambda: setattr(framework.optimizer, "steps", steps),
    ):
        refused(re.escape(text), call, ArgumentError)
    assert framework.optimizer.steps == STEPS


@pytest.mark.parametrize("samples", [0, -1, float("nan"), float("inf"), True, "4", torch.tensor(4)])
def test_sizes_that_make_no_sense(framework, samples):
    with pytest.raises(ValueError, match="the size of the micro-batch"):
        framework.apply(samples)


def test_sizes_for_some_micro_batches_only(framework):
    framework.apply(4)
    refused("to every micro-batch", framework.apply)
    framework.optimizer.discard()
    framework.apply()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda framework: framework.ours(), "needs steps"),
        (lambda framework: framework.plain([], 2), r"wraps a (torch|Keras 3) optimizer, not a (builtins\.)?list"),
        (lambda framework: framework.plain(framework.optimizer, 2), "over 3 micro-batches: wrap it once"),
        (lambda _: optim.SGD([torch.ones(1)], lr=0.1), "not a list"),
        (lambda _: optim.Optimizer(torch.optim.LBFGS([torch.ones(1)]), 2), "inside the closure"),
        (lambda _: optimizers.Adam(2, gradient_accumulation_steps=4), "leave out gradient_accumulation_steps"),
        (lambda _: optimizers.Optimizer(keras.optimizers.LossScaleOptimizer(optimizers.Adam(2)), 2), "wrap it once"),
        (lambda _: optimizers.SGD(2).apply([1.0, 2.0], [keras.Variable(1.0)]), "2 gradients were given for 1 v"),
    ],
)
def test_wrong_calls(framework, call, text):
    refused(text, lambda: call(framework), ValueError)


TORCH = "import torch; from elasticdl.ga.torch import optim; optim.SGD(2, [torch.nn.Parameter(torch.zeros(1))], lr=1.0)"
KERAS = "import elasticdl.ga.keras; elasticdl.ga.keras.optimizers.SGD(2, 1.0); assert 'torch' not in sys.modules"
BARRED = ["horovod", "grpc", "pydantic", "elasticdl.elastic", "elasticdl.proto"]


def run(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("code", "barred"), [(TORCH, [*BARRED, "tensorflow", "keras"]), (KERAS, BARRED)])
def test_it_needs_its_framework_and_nothing_else(code, barred):
    run("-c", f"import sys\nfor name in {barred}:\n    sys.modules[name] = None  # an import raises\n{code}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulate_torch.py", "accumulate_keras.py"])
def test_the_examples(name):
    printed = run(str(ROOT / "examples" / name), "--epochs", "2")
    accuracies = [float(value) for value in re.findall(r"epoch \d+: accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 50
