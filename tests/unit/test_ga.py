"""What accumulation promises with either framework: the numbers of one big batch, whatever happens between micro-batches."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from ga_kit import EXACT, STEPS, Keras, Torch, flat, make_batches, make_data
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal_kit import refused

from elasticdl.ga.keras.callbacks import ExactEpochs

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("framework", [Torch, Keras], ids=["torch", "keras"])


# -- the numbers --


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("framework", "name"), [(each, name) for each in (Torch, Keras) for name in each.shipped])
def test_micro_batches_give_what_one_big_batch_gives(framework, name, dtype):
    # Muon's own scaling cannot be computed by Keras in double precision.
    odd = framework is Keras and (name, dtype) == ("Muon", "float64")
    given = {"name": name, "rate": None, "dtype": dtype, **({"rms_rate": None} if odd else {})}
    batches = make_batches((5, 5, 2), dtype)
    theirs = framework.plain(batches, **given)
    assert framework(**given).difference(theirs) > 1e-5, "trained at all"
    assert framework(**given).train(flat(batches), samples=True).same(theirs, EXACT[dtype])


@BOTH
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_without_gradient_in_some_or_all_micro_batches(framework):
    def run(steps, batches):
        weights = framework.weights([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
        optimizer = framework.make("SGD", weights, steps, 0.1, weight_decay=0.1, momentum=0.9)
        for gradients in batches:
            framework.apply(optimizer, weights, gradients)
        return [weight.numpy(force=True) if framework is Torch else weight.numpy() for weight in weights]

    ours = run(2, [(2.0, None, None)] * 2 + [(None, 2.0, None), (1.0, 1.0, None)])
    assert np.allclose(ours, run(None, [(2.0, None, None), (0.5, 1.5, None)]), rtol=1e-12, atol=0)
    assert ours[2].tolist() == [1.0, 1.0], "no gradient at all: not even weight decay"


@BOTH
def test_half_precision_is_summed_in_single(framework):
    weights = framework.weights(0.0, dtype="bfloat16")
    optimizer = framework.make("SGD", weights, 4, 1.0)
    for value in (256.0, 1.0, 1.0, 2.0):  # in bfloat16 the sum would stay 256, but for the last
        framework.apply(optimizer, weights, [value])
    assert float(weights[0]) == -65.0


# -- whatever happens between two micro-batches --


class Accumulating:
    """Of one framework, and what is expected of it: the big batches that were completed."""

    def __init__(self, framework, sized):
        self.training, self.sized = framework(), sized
        self.data = make_data(200)
        self.taken, self.pending, self.is_broken, self.batches = 0, [], False, []

    def next(self, size):
        start = self.taken
        self.taken += size
        return tuple(part[start : self.taken] for part in self.data)

    def take(self, size, is_finite):
        micro_batch = self.next(size if self.sized else 3)
        steps_now = self.training.optimizer.will_step
        assert steps_now == (len(self.pending) + 1 >= self.training.optimizer.steps)
        self.hand_over(*micro_batch, float("inf") if not is_finite else 1.0, {"samples": size} if self.sized else {})
        self.pending.append(micro_batch)
        self.is_broken |= not is_finite
        if steps_now:
            self.complete()

    def complete(self):
        self.batches += [self.pending] if self.pending and not self.is_broken else []
        self.pending, self.is_broken = [], False

    def flush(self):
        done = bool(self.training.optimizer.flush())
        assert done == bool(self.pending) or self.is_broken
        self.complete()
        assert not self.training.optimizer.flush(), "nothing left"

    def discard(self):
        self.training.optimizer.discard()
        self.pending, self.is_broken = [], False

    def change_steps(self, steps):
        self.training.optimizer.steps = steps

    def check(self):
        assert self.training.same(type(self.training).plain(self.batches), 1e-9)


class TorchAccumulating(Accumulating):
    """Without a scaler, with one whose scale changes with every micro-batch, and with ``unscale_()``."""

    def __init__(self, way, sized):
        super().__init__(Torch, sized)
        self.way, self.scale = way, 1024.0  # powers of two: what is scaled and unscaled is bit for bit what it was
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=1)

    def hand_over(self, inputs, labels, factor, sizes):
        optimizer = self.training.optimizer
        optimizer.zero_grad()
        loss = self.training.loss(inputs, labels) * factor
        if self.way == "plain":
            loss.backward()
            optimizer.step(**sizes)
            return
        self.scaler.scale(loss).backward()
        if self.way == "unscaled":
            self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer, **sizes)
        self.scaler.update()
        self.scale *= 2.0 if factor == 1.0 else 0.5
        assert self.scaler.get_scale() == self.scale

    def load(self, steps):
        """In another process, without trust."""
        old, self.training = self.training, Torch(steps=steps)
        state = old.optimizer.state_dict()
        assert ("accumulation" in state) == bool(self.pending)
        with tempfile.TemporaryFile() as file:
            torch.save((old.model.state_dict(), state), file)
            file.seek(0)
            model, state = torch.load(file, weights_only=True)
        self.training.model.load_state_dict(model)
        self.training.optimizer.load_state_dict(state)


class KerasAccumulating(Accumulating):
    """Without a scaler, and with one inside."""

    def __init__(self, way, sized):
        self.way = way
        super().__init__(lambda: self.make(STEPS), sized)

    def make(self, steps):
        def scaled(_):
            adam = keras.optimizers.Adam(0.1)
            return Keras.wrap(keras.optimizers.LossScaleOptimizer(adam, initial_scale=1024.0), steps)

        made = Keras(steps=steps, optimizer=scaled if self.way == "scaled" else None)
        made.model.compile(made.optimizer, "mse", auto_scale_loss=False)
        made.optimizer.build(made.variables)
        return made

    def hand_over(self, inputs, labels, factor, sizes):
        told = self.training.take(inputs, labels, factor, **sizes)
        assert int(told) == int(self.training.optimizer.iterations)

    def load(self, steps):
        old, self.training = self.training, self.make(steps)
        with tempfile.TemporaryDirectory() as folder:
            old.model.save_weights(f"{folder}/of.weights.h5")
            self.training.model.load_weights(f"{folder}/of.weights.h5")

    def check(self):
        super().check()
        assert int(self.training.optimizer.iterations) == len(self.batches)
        assert self.training.optimizer.accumulated == len(self.pending)


few = st.integers(1, 5)
happening = st.one_of(
    st.tuples(st.just("take"), few, st.just(True)),
    st.tuples(st.just("take"), few, st.just(True)),
    st.tuples(st.just("take"), few, st.sampled_from([True, True, False])),
    st.tuples(st.sampled_from(["change_steps", "load"]), few),
    st.tuples(st.sampled_from(["flush", "discard"])),
)


def tell(loop, story):
    for what, *arguments in story:
        if what == "take" and loop.way == "plain":
            arguments[1] = True  # who has no scaler has no overflow either
        getattr(loop, what)(*arguments)
    loop.check()


@pytest.mark.parametrize("way", ["plain", "scaled", "unscaled"])
@settings(max_examples=30)
@given(sized=st.booleans(), story=st.lists(happening, max_size=20))
def test_a_loop_of_torchs_makes_the_steps_of_big_batches_whatever_happens(way, sized, story):
    tell(TorchAccumulating(way, sized), story)


@pytest.mark.parametrize("way", ["plain", "scaled"])
@settings(max_examples=8)
@given(sized=st.booleans(), story=st.lists(happening, max_size=12))
def test_a_loop_of_keras_s_makes_the_steps_of_big_batches_whatever_happens(way, sized, story):
    tell(KerasAccumulating(way, sized), story)


# -- arguments --


@pytest.fixture(params=[Torch, Keras], ids=["torch", "keras"])
def one(request):
    """An accumulating optimizer of one framework over one variable, and how others are made."""
    framework = request.param
    weights = framework.weights([1.0])
    rate = {"params": weights, "lr": 0.25} if framework is Torch else {"learning_rate": 0.25}
    return SimpleNamespace(
        ours=framework.ready.SGD,
        plain=framework.wrap,
        wrapped=lambda: framework.kind(**rate),
        rate=rate,
        optimizer=framework.ready.SGD(STEPS, **rate),
        apply=lambda made, **sizes: framework.apply(made, weights, [1.0], **sizes),
    )


def test_steps_come_first_or_by_name(one):
    rate = one.rate.values()
    wrapped = [one.plain(one.wrapped(), 5), one.plain(one.wrapped(), steps=5)]
    made = [one.ours(5, *rate), one.ours(*rate, steps=5), one.ours(steps=5, **one.rate), *wrapped]
    rates = {each.param_groups[0]["lr"] if "lr" in one.rate else float(each.learning_rate) for each in made}
    assert ({each.steps for each in made}, rates) == ({5}, {0.25})


def sizes_for_some(one):
    one.apply(one.optimizer, samples=4)
    one.apply(one.optimizer)


def float8(_):
    scale = keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    Keras.ready.SGD(3, 1.0).build([scale])


def built(steps=2):
    made = Keras.ready.SGD(steps, 1.0)
    made.build([keras.Variable(1.0, name="first"), keras.Variable(1.0, name="second")])
    return made


def late_gradient(_):
    """Of a variable that had none when the update was traced."""
    made = built(1)
    first, second = made.optimizer._trainable_variables
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        tf.function(lambda: made.apply([tf.constant(1.0)], [first]))()
    made.apply([tf.constant(1.0)], [second])


def fit_exactly(_):
    training = Keras(steps=None)
    training.model.compile(training.optimizer, "mse")
    training.model.fit(*make_data(8), callbacks=[ExactEpochs()], verbose=0)


STEPS_ARE = [(0, "1, not 0"), (2.0, "1, not 2.0"), (True, "not True"), ("4", "not '4'"), ([], "not a list")]
REFUSED = [
    *((lambda one, steps=steps: one.plain(one.wrapped(), steps), text) for steps, text in STEPS_ARE),
    (lambda one: one.ours(0, **one.rate), "at least 1, not 0"),
    (lambda one: setattr(one.optimizer, "steps", 0), "at least 1, not 0"),
    (lambda one: one.ours(), "needs steps"),
    *(
        (lambda one, samples=samples: one.apply(one.optimizer, samples=samples), "the size of the micro-batch")
        for samples in (0, -1, float("nan"), float("inf"), True, "4")
    ),
    (sizes_for_some, "to every micro-batch"),
    (lambda one: one.plain([], 2), r"wraps a (torch|Keras 3) optimizer, not a (builtins\.)?list"),
    (lambda one: one.plain(one.optimizer, 2), "over 3 micro-batches: wrap it once"),
    (lambda _: Torch.ready.SGD([torch.ones(1)], lr=0.1), "not a list"),
    (lambda _: Torch.wrap(torch.optim.LBFGS([torch.ones(1)]), 2), "inside the closure"),
    (lambda _: Keras.ready.Adam(2, gradient_accumulation_steps=4), "leave out gradient_accumulation_steps"),
    (lambda _: Keras.wrap(keras.optimizers.LossScaleOptimizer(Keras.ready.Adam(2)), 2), "wrap it once"),
    (lambda _: Keras.ready.SGD(2).apply([tf.constant(1.0)] * 2, [keras.Variable(1.0)]), "2 gradients were given"),
    (lambda _: Keras.ready.SGD(2).apply([1.0]), "call build"),
    (lambda _: built().apply([tf.constant(1.0)], [keras.Variable(1.0, name="other")]), "the variable 'other'"),
    (lambda _: built().apply([None, None]), "no gradient"),
    (late_gradient, "'second' had no gradient when"),
    (float8, "is a scale of float8"),
    (fit_exactly, r"elasticdl\.ga\.keras\.optimizers, not with a Adam"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_calls(one, call, text):
    refused(text, lambda: call(one))
    assert one.optimizer.steps == STEPS


@pytest.mark.parametrize(
    ("module", "name", "value", "text"),
    [
        (tf.distribute, "get_strategy", SimpleNamespace(num_replicas_in_sync=2), r"without tf\.distribute"),
        (keras.backend, "backend", "jax", "on TensorFlow, not on jax"),
    ],
)
def test_where_keras_does_not_accumulate(monkeypatch, module, name, value, text):
    made = keras.optimizers.Adam()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda: value)
        refused(text, lambda: Keras.wrap(made, 2))


# -- what it needs --


TORCH = "import torch; from elasticdl.ga.torch import optim; optim.SGD(2, [torch.nn.Parameter(torch.zeros(1))], lr=1.0)"
KERAS = "import elasticdl.ga.keras; elasticdl.ga.keras.optimizers.SGD(2, 1.0); assert 'torch' not in sys.modules"
BARRED = ["horovod", "grpc", "pydantic", "elasticdl.elastic", "elasticdl.proto"]


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, env=environment)
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
