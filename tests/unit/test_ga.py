"""Accumulation gives the numbers of one big batch, with either framework, whatever happens between micro-batches."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal_kit import refused
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from elasticdl.ga.keras import callbacks, optimizers
from elasticdl.ga.torch import optim

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
EXACT = {"float32": 1e-6, "float64": 1e-12}  # how much two trainings may be apart that compute the same


# -- models that are trained alike, on micro-batches or on the one big batch of each update --


def make_data(count, dtype="float64"):
    random = np.random.default_rng(1)
    return random.normal(size=(count, 6)).astype(dtype), random.normal(size=(count, 4)).astype(dtype)


def make_batches(sizes=(4, 4, 4), dtype="float64", updates=4):
    """For each update one list of micro-batches."""
    inputs, labels = make_data(sum(sizes) * updates, dtype)
    cuts = np.cumsum(sizes * updates)[:-1]
    stream = list(zip(np.split(inputs, cuts), np.split(labels, cuts), strict=True))
    return [stream[start : start + len(sizes)] for start in range(0, len(stream), len(sizes))]


def flat(batches):
    return [micro_batch for micro_batches in batches for micro_batch in micro_batches]


def big(batches):
    return [tuple(np.concatenate(part) for part in zip(*batch, strict=True)) for batch in batches]


class SmallTraining:
    """A model of two layers and its optimizer: one that accumulates, or with ``steps=None`` the framework's own.

    ``optimizer``: a function of the variables, in place of the one of that name.
    """

    def __init__(self, name="Adam", steps=STEPS, rate=0.1, dtype="float64", optimizer=None, **options):
        self.model = self.make_model(dtype)
        made = optimizer or (lambda variables: self.make(name, variables, steps, rate, **options))
        self.optimizer = made(self.variables)

    @classmethod
    def make(cls, name, weights, steps=None, rate=None, **options):
        """``steps`` and a rate are given only if they are not None."""
        kind = getattr(cls.theirs if steps is None else cls.ready, name)
        rate = {} if rate is None else {cls.rate: rate}
        return kind(*[steps] * (steps is not None), *[weights] * cls.takes_weights, **rate, **options)

    def train(self, stream, samples=False):
        for inputs, labels in stream:
            self.take(inputs, labels, **({"samples": len(inputs)} if samples else {}))
        return self

    @classmethod
    def plain(cls, batches, **options):
        """What is wanted: the framework alone, whole batches."""
        return cls(steps=None, **options).train(big(batches))

    def difference(self, other):
        """The largest of all variables, relative to the variable."""
        pairs = list(zip(self.numbers(), other.numbers(), strict=True))
        return max(np.linalg.norm(mine - theirs) / (np.linalg.norm(theirs) or 1.0) for mine, theirs in pairs)

    def same(self, other, tolerance=1e-12):
        return self.difference(other) <= tolerance


class Torch(SmallTraining):
    wrap, ready, theirs, rate, takes_weights = optim.Optimizer, optim, torch.optim, "lr", True
    shipped = sorted(
        {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
        - {"Optimizer", "LBFGS", "SparseAdam"}
    )

    @staticmethod
    def make_model(dtype="float64"):
        torch.manual_seed(0)
        # No biases: Muon takes matrices only.
        linear = [torch.nn.Linear(size, 4, bias=False, dtype=getattr(torch, dtype)) for size in (6, 4)]
        return torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1])

    @staticmethod
    def weights(*values, dtype="float64"):
        return [torch.nn.Parameter(torch.tensor(value, dtype=getattr(torch, dtype))) for value in values]

    @staticmethod
    def apply(optimizer, weights, gradients, **sizes):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient * torch.ones_like(weight) if isinstance(gradient, float) else gradient
        optimizer.step(**sizes)

    @property
    def variables(self):
        return list(self.model.parameters())

    def numbers(self):
        return [each.detach().numpy() for each in self.model.parameters()]

    def loss(self, inputs, labels):
        outputs = self.model(torch.as_tensor(inputs))
        return torch.nn.functional.mse_loss(outputs, torch.as_tensor(labels))

    def take(self, inputs, labels, **sizes):
        self.optimizer.zero_grad()
        self.loss(inputs, labels).backward()
        self.optimizer.step(**sizes)

    def load(self, other):
        """What the other has saved, as in another process, without trust."""
        with tempfile.TemporaryFile() as file:
            torch.save((other.model.state_dict(), other.optimizer.state_dict()), file)
            file.seek(0)
            model, state = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state)


class Keras(SmallTraining):
    wrap, ready, theirs, rate = optimizers.Optimizer, optimizers, keras.optimizers, "learning_rate"
    takes_weights = False
    shipped = sorted(set(optimizers.__all__) - {"Optimizer"})

    @staticmethod
    def make_model(dtype="float64"):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        layers = [dense(4, activation="tanh", dtype=dtype), dense(4, use_bias=False, dtype=dtype)]
        return keras.Sequential([keras.Input((6,), dtype=dtype), *layers])

    @staticmethod
    def weights(*values, dtype="float64"):
        return [keras.Variable(value, dtype=dtype) for value in values]

    @staticmethod
    def apply(optimizer, weights, gradients, **sizes):
        given = zip(weights, gradients, strict=True)
        whole = [tf.ones_like(w.value) * each if isinstance(each, float) else each for w, each in given]
        optimizer.apply(whole, weights, **sizes)

    @property
    def variables(self):
        return self.model.trainable_variables

    def numbers(self):
        return [each.numpy() for each in self.model.variables]

    def gradients(self, inputs, labels):
        with tf.GradientTape() as tape:
            kernel, bias, last = self.variables  # the model, without the time that its layers take
            outputs = tf.tanh(inputs @ kernel.value + bias.value) @ last.value
            loss = self.optimizer.scale_loss(tf.reduce_mean(tf.square(outputs - labels)))
        return tape.gradient(loss, [variable.value for variable in self.variables])

    def take(self, inputs, labels, factor=1.0, **sizes):
        gradients = [gradient * factor for gradient in self.gradients(inputs, labels)]
        return self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True), **sizes)

    def load(self, other):
        for each in (self, other):
            each.model.compile(each.optimizer, "mse", auto_scale_loss=False)
            each.optimizer.build(each.variables)
        with tempfile.TemporaryDirectory() as folder:
            other.model.save_weights(f"{folder}/of.weights.h5")
            self.model.load_weights(f"{folder}/of.weights.h5")


BOTH = pytest.mark.parametrize("framework", [Torch, Keras], ids=["torch", "keras"])


def numbers(*weights):
    return [each.detach().numpy() if isinstance(each, torch.Tensor) else each.numpy() for each in weights]


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
        return numbers(*weights)

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


def rows_of_torch(rows, values):
    return torch.sparse_coo_tensor([rows], torch.tensor(values), (8, 4))


def rows_of_keras(rows, values):
    return tf.IndexedSlices(*map(tf.constant, (values, rows, [8, 4])))


@pytest.mark.parametrize(
    ("framework", "name", "rows_of", "whole"),
    [  # Keras by itself would take the square of each row before it adds those that are the same
        (Torch, "SparseAdam", rows_of_torch, lambda each: each),
        (Keras, "Adam", rows_of_keras, tf.convert_to_tensor),
    ],
)
def test_gradients_that_are_rows_of_a_table(framework, name, rows_of, whole):
    def run(steps, gradients):
        weights = framework.weights(np.ones((8, 4)))
        optimizer = framework.make(name, weights, steps)
        for each in gradients:
            framework.apply(optimizer, weights, [each])
        return numbers(*weights)

    values = np.random.default_rng(1).normal(size=(6, 2, 4))
    rows = list(map(rows_of, [[1, 5], [5, 5], [0, 4], [2, 2], [2, 1], [7, 0]], values))
    a, b, c, d, e, f = map(whole, rows)
    expected = run(None, [(a + b + c) / STEPS, (d + e + f) / STEPS])
    np.testing.assert_allclose(run(STEPS, rows), expected, rtol=1e-11)


# -- whatever happens between two micro-batches --


class Accumulating:
    """A training of one framework, and what is expected of it: the big batches that were completed."""

    def __init__(self, way, sized):
        self.way, self.sized = way, sized
        self.training = self.make(STEPS)
        self.data = make_data(200)
        self.taken, self.pending, self.is_broken, self.batches = 0, [], False, []

    def take(self, size, is_finite):
        start = self.taken
        self.taken += size if self.sized else 3
        micro_batch = tuple(part[start : self.taken] for part in self.data)
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

    def load(self, steps):
        old, self.training = self.training, self.make(steps)
        self.training.load(old)

    def check(self):
        assert self.training.same(type(self.training).plain(self.batches), 1e-9)


class TorchAccumulating(Accumulating):
    """Without a scaler, with one whose scale changes with every micro-batch, and with ``unscale_()``."""

    make = staticmethod(lambda steps: Torch(steps=steps))

    def __init__(self, way, sized):
        super().__init__(way, sized)
        self.scale = 1024.0  # powers of two: what is scaled and unscaled is bit for bit what it was
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


class KerasAccumulating(Accumulating):
    """Without a scaler, and with one inside."""

    def make(self, steps):
        def scaled(_):
            adam = keras.optimizers.Adam(0.1)
            return Keras.wrap(keras.optimizers.LossScaleOptimizer(adam, initial_scale=1024.0), steps)

        made = Keras(steps=steps, optimizer=scaled if self.way == "scaled" else None)
        made.optimizer.build(made.variables)
        return made

    def hand_over(self, inputs, labels, factor, sizes):
        told = self.training.take(inputs, labels, factor, **sizes)
        assert int(told) == int(self.training.optimizer.iterations)

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


@BOTH
def test_states_are_exchanged_with_the_framework(framework):
    batches = make_batches(updates=3)
    theirs, ours, plain = framework(steps=None), framework(), framework(steps=None)
    theirs.train(big(batches[:1]))
    ours.train(batches[2][:1]).load(theirs)  # what it had taken is dropped
    plain.load(ours.train(batches[1]))
    assert plain.train(big(batches[2:])).same(theirs.train(big(batches[1:])))


# -- with torch: closures, scalers, schedulers, copies, `torch.compile` --


def test_a_closure_is_called_once_and_a_gradient_that_is_cleared_counts_for_nothing():
    training, calls = Torch(), []
    optimizer = training.optimizer
    for number, (inputs, labels) in enumerate(flat(make_batches()), 1):

        def evaluate(inputs=inputs, labels=labels):
            calls.append(1)
            loss = training.loss(inputs, labels)
            loss.backward()
            return loss

        training.loss(inputs * float("nan"), labels).backward()
        optimizer.zero_grad()
        optimizer.step()
        will_step, expected = optimizer.will_step, training.loss(inputs, labels)
        with torch.no_grad():
            assert optimizer.step(evaluate) == expected
        assert will_step == optimizer.stepped == (number % STEPS == 0)
        assert len(calls) == number
        assert all(weight.grad is None for weight in training.variables)
    assert training.same(Torch.plain(make_batches()))


@pytest.mark.parametrize("fused", [False, True])  # fused optimizers have a way of their own with scalers
def test_clipping_acts_on_the_accumulated_gradient_also_under_a_scaler(fused):
    ours, theirs = Torch(fused=fused), Torch(steps=None, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for each in (ours, theirs):

        def clip(optimizer, *_, each=each):
            assert clip_grad_norm_(each.variables, 0.1).item() > 0.1, "clipped at all"

        each.optimizer.register_step_pre_hook(clip)
    for inputs, labels in flat(make_batches()):
        ours.optimizer.zero_grad()
        scaler.scale(ours.loss(inputs, labels)).backward()
        scaler.step(ours.optimizer)
        scaler.update()
    assert ours.same(theirs.train(flat(make_batches((12,)))))


def test_a_scheduler_stepped_with_every_micro_batch_is_warned_of():
    training = Torch()
    scheduler = StepLR(training.optimizer, 1, 0.5)
    first, second = make_batches()[0][:2]
    training.train([first])
    scheduler.step()
    with pytest.warns(UserWarning, match=r"only `if optimizer\.stepped`"):
        training.train([second])


def test_memory_of_a_gradient_that_is_used_again_and_a_group_that_is_added_and_a_gradient_that_flush_finds():
    first, second = Torch.weights([0.0] * 3, 0.0)
    optimizer, bucket = optim.SGD(2, [first], lr=1.0), torch.empty(5, dtype=torch.float64)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    for value in (1.0, 3.0):
        bucket.fill_(value)
        first.grad, second.grad = bucket[1:4], bucket[0]
        optimizer.step()
    assert (first.tolist(), second.item()) == ([-2.0] * 3, -1.0)
    first.grad = torch.ones_like(first)
    assert optimizer.flush()
    assert first.tolist() == [-3.0] * 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_go_on_by_themselves(duplicate):
    stream, wanted = flat(make_batches()), Torch.plain(make_batches())
    training = Torch()
    StepLR(training.optimizer, 100)  # torch then keeps a function in the optimizer
    training.train(stream[:5])
    other = duplicate(training)
    assert other.train(stream[5:]).same(wanted)
    assert not training.same(wanted), "the original stands where it stood"
    assert training.train(stream[5:]).same(wanted)


def test_a_compiled_loop_is_compiled_once_whatever_the_count_of_micro_batches():
    torch._dynamo.reset()
    count = CompileCounter()
    ours = Torch()
    body = torch.compile(ours.take, backend=count)
    for micro_batch in flat(make_batches()):
        body(*map(torch.as_tensor, micro_batch))
    torch._dynamo.reset()
    assert ours.same(Torch.plain(make_batches()))
    assert count.frame_count == 1


# -- with Keras: options, traced functions, `fit`, half precision --


def by(optimizer):
    """A training by this optimizer."""
    return Keras(optimizer=lambda _: optimizer)


def test_every_optimizer_of_keras_is_there_but_those_made_of_others():
    theirs = {name for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    assert set(optimizers.__all__) == theirs - {"LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}


def test_hyperparameters_are_those_of_the_wrapped_optimizer():
    optimizer = optimizers.Adam(STEPS, weight_decay=0.5, beta_1=0.8)
    wrapped = optimizer.optimizer
    assert (optimizer.weight_decay, optimizer.beta_1, optimizer.name) == (0.5, 0.8, wrapped.name)
    optimizer.weight_decay, optimizer.beta_1, optimizer.learning_rate = 0.25, 0.7, 0.5
    assert (wrapped.weight_decay, wrapped.beta_1, float(wrapped.learning_rate)) == (0.25, 0.7, 0.5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_traced_once_even_if_steps_change(jit_compile):
    batches = make_batches((2,) * 6, updates=2)
    training, traces = Keras(steps=6), []
    optimizer = training.optimizer
    optimizer.build(training.variables)

    @tf.function(jit_compile=jit_compile)
    def step(inputs, labels, samples):
        traces.append(1)
        optimizer.apply(training.gradients(inputs, labels), training.variables, samples=samples)

    flush = tf.function(optimizer.flush)
    for index, (inputs, labels) in enumerate(flat(batches)):
        optimizer.steps = 6 if index < 6 else 4
        step(tf.constant(inputs), tf.constant(labels), tf.constant(2))
    assert [bool(flush()) for _ in range(2)] == [True, False]
    assert training.same(Keras.plain([batches[0], batches[1][:4], batches[1][4:]]))
    assert len(traces) == 1


def fit(optimizer, batch_size, count, epochs=2, mode=None, **options):
    training = by(optimizer)
    training.model.compile(optimizer, "mse", **mode or {"jit_compile": False})
    fitted = training.model.fit(*make_data(count), batch_size, epochs, verbose=0, shuffle=False, **options)
    training.history = fitted.history
    return training


@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": False, "steps_per_execution": 2}])
def test_exact_epochs_of_fit(mode):
    """Of batches of 10, 10 and 3, before each evaluation; also of a model that was compiled anew."""
    validated = {"validation_data": make_data(8)}
    theirs = fit(keras.optimizers.Adam(0.1), 10, 23, **validated)
    ours = fit(optimizers.Adam(2, 0.1), 5, 23, mode=mode, callbacks=[callbacks.ExactEpochs()], **validated)
    assert int(ours.optimizer.iterations) == 6
    assert ours.same(theirs)
    assert np.allclose(ours.history["val_loss"], theirs.history["val_loss"], rtol=1e-5)
    ours.model.compile(keras.optimizers.Adam(0.1), "mse", **mode)
    ours.model.fit(*make_data(23), 5, verbose=0)  # goes on without


def test_fit_without_the_callback_carries_on_and_loses_nothing_and_options_act_on_big_batches():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    options = {"learning_rate": decay, "clipnorm": 0.1, "use_ema": True, "ema_momentum": 0.6, "weight_decay": 0.5}
    ours, theirs = optimizers.Adam(STEPS, **options), keras.optimizers.Adam(**options)
    for each in (ours, theirs):
        each.exclude_from_weight_decay(var_names=["kernel"])
    trained = fit(ours, 6, 24)  # 2 epochs of 4: the second update has micro-batches of both, and 2 are left
    assert (int(ours.iterations), ours.accumulated) == (3, 0)
    inputs, labels = make_data(24)
    stream = [(inputs[start : start + 6], labels[start : start + 6]) for start in (0, 6, 12, 18)] * 2
    plain = by(theirs).train(big([stream[:3], stream[3:6], stream[6:]]))
    theirs.finalize_variable_values(plain.variables)
    assert trained.same(plain, 1e-6), "fit computes the loss in single precision"


@pytest.fixture
def _mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("_mixed_float16")
def test_fit_in_mixed_precision():
    def run(optimizer, batch_size, **options):
        training = by(optimizer)
        keras.utils.set_random_seed(0)
        training.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        training.model.compile(optimizer, "mse", jit_compile=False, **options)
        exact = [callbacks.ExactEpochs()] if batch_size == 4 else []
        training.model.fit(*make_data(16, "float32"), batch_size, epochs=2, callbacks=exact, verbose=0, shuffle=False)
        return training

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)

    theirs = run(scaled(), 8)
    around, inside = optimizers.SGD(2, 0.1), optimizers.Optimizer(scaled(), 2)
    for ours in (run(around, 4), run(inside, 4, auto_scale_loss=False)):  # around the first one Keras puts a scaler
        assert ours.same(theirs, 1e-3), "half precision rounds"
        assert int(ours.model.optimizer.iterations) == 4
    refused("auto_scale_loss=False", lambda: run(optimizers.Optimizer(scaled(), 2), 4))


def test_going_on_from_a_saved_model_also_in_the_middle(tmp_path):
    training, other, stream = by(optimizers.Adam(STEPS, 0.1)), Keras(), flat(make_batches())
    training.model.compile(training.optimizer, "mse", jit_compile=False)
    training.train(stream[: STEPS + 2])
    training.model.save(tmp_path / "model.keras")
    other.model = keras.models.load_model(tmp_path / "model.keras")
    other.optimizer = other.model.optimizer
    assert type(other.optimizer) is optimizers.Optimizer
    assert (other.optimizer.steps, other.optimizer.accumulated, int(other.optimizer.iterations)) == (STEPS, 2, 1)
    assert other.train(stream[STEPS + 2 :]).same(Keras.plain(make_batches()))


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
        wrapped=lambda: framework.theirs.SGD(**rate),
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
    optimizers.SGD(3, 1.0).build([scale])


def built(steps=2):
    made = optimizers.SGD(steps, 1.0)
    made.build([keras.Variable(1.0, name="first"), keras.Variable(1.0, name="second")])
    return made


def late_gradient(_):
    """Of a variable that had none when the update was traced."""
    made = built(1)
    first, second = made.optimizer._trainable_variables
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        tf.function(lambda: made.apply([tf.constant(1.0)], [first]))()
    made.apply([tf.constant(1.0)], [second])


def elsewhere(module, name, value):
    made = keras.optimizers.Adam()
    with patch.object(module, name, lambda: value):
        Keras.wrap(made, 2)


TWO_REPLICAS = SimpleNamespace(num_replicas_in_sync=2)
STEPS_ARE = [(0, "1, not 0"), (2.0, "1, not 2.0"), (True, "not True"), ([], "not a list")]
REFUSED = [
    *((lambda one, steps=steps: one.plain(one.wrapped(), steps), text) for steps, text in STEPS_ARE),
    (lambda one: one.ours(0, **one.rate), "at least 1, not 0"),
    (lambda one: setattr(one.optimizer, "steps", 0), "at least 1, not 0"),
    (lambda one: one.ours(), "needs steps"),
    *(
        (lambda one, samples=samples: one.apply(one.optimizer, samples=samples), "the size of the micro-batch")
        for samples in (0, float("nan"), float("inf"), True, "4")
    ),
    (sizes_for_some, "to every micro-batch"),
    (lambda one: one.plain([], 2), r"wraps a (torch|Keras 3) optimizer, not a (builtins\.)?list"),
    (lambda one: one.plain(one.optimizer, 2), "over 3 micro-batches: wrap it once"),
    (lambda _: optim.Optimizer(torch.optim.LBFGS([torch.ones(1)]), 2), "inside the closure"),
    (lambda _: optimizers.Adam(2, gradient_accumulation_steps=4), "leave out gradient_accumulation_steps"),
    (lambda _: Keras.wrap(keras.optimizers.LossScaleOptimizer(optimizers.Adam(2)), 2), "wrap it once"),
    (lambda _: optimizers.SGD(2).apply([tf.constant(1.0)] * 2, [keras.Variable(1.0)]), "2 gradients were given"),
    (lambda _: optimizers.SGD(2).apply([1.0]), "call build"),
    (lambda _: built().apply([tf.constant(1.0)], [keras.Variable(1.0, name="other")]), "the variable 'other'"),
    (lambda _: built().apply([None, None]), "no gradient"),
    (late_gradient, "'second' had no gradient when"),
    (lambda _: elsewhere(keras.backend, "backend", "jax"), "on TensorFlow, not on jax"),
    (lambda _: elsewhere(tf.distribute, "get_strategy", TWO_REPLICAS), r"without tf\.distribute"),
    (lambda _: Torch().optimizer.load_state_dict({"accumulation": {}}), r"give what state_dict\(\) returned"),
    (float8, "is a scale of float8"),
    (lambda _: callbacks.accumulating(keras.optimizers.Adam()), r"elasticdl\.ga\.keras\.optimizers, not with a Adam"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_calls(one, call, text):
    refused(text, lambda: call(one))
    assert one.optimizer.steps == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulate_torch.py", "accumulate_keras.py"])
def test_the_examples(name):
    command = [sys.executable, str(ROOT / "examples" / name), "--epochs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    accuracies = [float(value) for value in re.findall(r"epoch \d+: accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 2, done.stderr
    assert accuracies[-1] > 50
