"""Accumulated micro-batches against the one big batch that Keras itself is given."""

import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.common.errors import UserError
from elasticdl.ga.keras import callbacks, optimizers

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(set(optimizers.__all__) - {"Optimizer"})
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
STEPS, UPDATES = 3, 3


def make_model(dtype="float64", **kwargs):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = [dense(4, activation="tanh", dtype=dtype, **kwargs), dense(4, use_bias=False, dtype=dtype)]
    return keras.Sequential([keras.Input((6,), dtype=dtype), *layers])


def make_data(count, dtype="float64"):
    random = np.random.default_rng(1)
    return random.normal(size=(count, 6)).astype(dtype), random.normal(size=(count, 4)).astype(dtype)


def make_batches(sizes=(4, 4, 4), dtype="float64", updates=UPDATES):
    """For each update one list of micro-batches."""
    inputs, labels = make_data(sum(sizes) * updates, dtype)
    cuts = np.cumsum(sizes * updates)[:-1]
    stream = list(zip(np.split(inputs, cuts), np.split(labels, cuts), strict=True))
    return [stream[start : start + len(sizes)] for start in range(0, len(stream), len(sizes))]


def flat(batches):
    return [micro_batch for micro_batches in batches for micro_batch in micro_batches]


def big(batches):
    return [tuple(np.concatenate(part) for part in zip(*batch, strict=True)) for batch in batches]


def gradients(model, optimizer, inputs, labels):
    with tf.GradientTape() as tape:
        kernel, bias, last = model.trainable_variables  # the model, without the time that its layers take
        outputs = tf.tanh(inputs @ kernel.value + bias.value) @ last.value
        loss = optimizer.scale_loss(tf.reduce_mean(tf.square(outputs - labels)))
    return tape.gradient(loss, [variable.value for variable in model.trainable_variables])


def train(model, optimizer, stream, samples=False):
    """Of plain optimizers and ours."""
    for inputs, labels in stream:
        sizes = {"samples": len(inputs)} if samples else {}
        pairs = zip(gradients(model, optimizer, inputs, labels), model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs, **sizes)
    return model


def difference(model, wanted):
    """The largest of all variables, relative to the variable."""
    pairs = [(mine.numpy(), theirs.numpy()) for mine, theirs in zip(model.variables, wanted.variables, strict=True)]
    return max(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs) for mine, theirs in pairs)


def same(model, wanted, tolerance=1e-12):
    return difference(model, wanted) <= tolerance


def adam(steps=STEPS, **kwargs):
    return optimizers.Adam(steps, learning_rate=0.1, **kwargs)


def plain_adam(**kwargs):
    return keras.optimizers.Adam(learning_rate=0.1, **kwargs)


@pytest.fixture(scope="module")
def wanted():
    """The model that Adam gives on the whole batches."""
    return train(make_model(), plain_adam(), big(make_batches()))


# The numbers


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHIPPED)
def test_micro_batches_give_what_one_big_batch_gives(name, dtype):
    # Muon's own scaling cannot be computed in double precision.
    kwargs = {"rms_rate": None} if (name, dtype) == ("Muon", "float64") else {}
    batches = make_batches((5, 3), dtype)
    theirs = train(make_model(dtype), getattr(keras.optimizers, name)(**kwargs), big(batches))
    ours = train(make_model(dtype), getattr(optimizers, name)(2, **kwargs), flat(batches), samples=True)
    assert difference(make_model(dtype), theirs) > 1e-5, "trained at all"
    assert same(ours, theirs, TOLERANCE[dtype])


def test_every_optimizer_of_keras_is_there_but_those_made_of_others():
    theirs = {name for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    assert set(optimizers.__all__) == theirs - {"LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}


def test_equal_micro_batches_need_no_sizes(wanted):
    assert same(train(make_model(), adam(), flat(make_batches())), wanted)


def test_unequal_micro_batches_without_their_sizes_weigh_the_same():
    theirs, ours = make_model(), make_model()
    plain = keras.optimizers.SGD(0.1)
    for batch in make_batches((5, 5, 2)):
        parts = [gradients(theirs, plain, *micro_batch) for micro_batch in batch]
        plain.apply([sum(part) / 3 for part in zip(*parts, strict=True)], theirs.trainable_variables)
    train(ours, optimizers.SGD(STEPS, 0.1), flat(make_batches((5, 5, 2))))
    assert same(ours, theirs)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Ftrl"])
def test_embeddings_whose_gradients_are_rows(name, twice):
    def run(optimizer, parts, dense=False):
        table = keras.Variable(np.linspace(-1, 1, 32).reshape(8, 4), dtype="float64")
        for rows, labels in parts:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.gather(table.value, rows) - labels))
            gradient = tape.gradient(loss, table.value)
            assert isinstance(gradient, tf.IndexedSlices)
            optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], [table])
        return table.numpy()

    rows, labels = np.array([1, 5, 5 if twice else 2, 0, 4, 3] * 2), make_data(12)[1]
    batches = [[(rows[i : i + 2], labels[i : i + 2]) for i in (start, start + 2, start + 4)] for start in (0, 6)]
    # Keras takes the square of each row before it adds those that are the same.
    theirs = run(getattr(keras.optimizers, name)(), big(batches), dense=twice)
    assert np.allclose(run(getattr(optimizers, name)(STEPS), flat(batches)), theirs, rtol=1e-12, atol=0)


def test_variables_without_gradient_in_some_or_all_micro_batches():
    def run(optimizer, batches):
        weights = [keras.Variable(np.ones(2), dtype="float64", name=name) for name in "abc"]
        for used in batches:
            optimizer.apply([weights[i] * 2 / len(used) if i in used else None for i in range(3)], weights)
        return [weight.numpy().tolist() for weight in weights]

    options = {"learning_rate": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        ours = run(optimizers.SGD(2, **options), [[0], [0], [1], [0, 1]])
    plain = keras.optimizers.SGD(**options)
    weights = [keras.Variable(np.ones(2), dtype="float64", name=name) for name in "abc"]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        plain.apply([weights[0] * 2, None, None], weights)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        plain.apply([weights[0] * 0.5, weights[1] * 1.5, None], weights)
    assert np.allclose(ours, [weight.numpy() for weight in weights], rtol=1e-12, atol=0)
    assert ours[2] == [1.0, 1.0], "no gradient at all: not even weight decay"


def test_half_precision_is_summed_in_single():
    weight = keras.Variable(0.0, dtype="bfloat16")
    optimizer = optimizers.SGD(4, 1.0)
    for value in (256.0, 1.0, 1.0, 2.0):  # in bfloat16 the sum would stay 256, but for the last
        optimizer.apply([tf.constant(value, "bfloat16")], [weight])
    assert weight.numpy() == -65.0


def test_float8_scales_are_replaced_by_the_largest():
    scale = keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    optimizer = optimizers.SGD(3, 1.0)
    for value in (2.0, 7.0, 3.0):
        assert scale.numpy() == 1.0
        optimizer.apply([tf.constant(value)], [scale])
    assert scale.numpy() == 7.0


# What acts on the gradient of the whole batch, and what counts optimizer steps

DECAY = keras.optimizers.schedules.ExponentialDecay
OPTIONS = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "weight_decay": {"weight_decay": 0.3},
    "loss scale": {"loss_scale_factor": 1024.0},
    "schedule": {"learning_rate": DECAY(0.1, 1, 0.5)},
    "average": {"use_ema": True, "ema_momentum": 0.6},
    "average that overwrites": {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3},
}


def with_options(make, *args, **options):
    return make(*args, **{"learning_rate": 0.1, **options})


def finished(model, optimizer, stream, **kwargs):
    train(model, optimizer, stream, **kwargs)
    optimizer.finalize_variable_values(model.trainable_variables)
    return model


@pytest.mark.parametrize("option", OPTIONS)
def test_options_act_on_big_batches(option):
    options = OPTIONS[option]
    theirs = finished(make_model(), with_options(keras.optimizers.SGD, **options), big(make_batches()))
    ours = finished(make_model(), with_options(optimizers.SGD, STEPS, **options), flat(make_batches()))
    assert same(ours, theirs)
    if option != "loss scale":
        without = finished(make_model(), keras.optimizers.SGD(0.1), big(make_batches()))
        assert not same(ours, without, 1e-3), "the option does something"


@pytest.mark.parametrize(
    ("option", "right"),
    [
        ("nothing", True),
        ("clipnorm", True),
        ("global_clipnorm", True),
        ("clipvalue", True),
        ("weight_decay", True),
        ("loss scale", True),
        ("schedule", False),
        ("average", False),
        ("average that overwrites", False),
        ("unequal micro-batches", False),
        ("remainder", False),
    ],
)
def test_what_the_docs_say_of_the_accumulation_that_keras_has(option, right):
    """If this fails after an update of Keras, the docs are to be changed; ours is tested above and below."""
    batches = make_batches((5, 5, 2) if option == "unequal micro-batches" else (4, 4, 4))
    if option == "remainder":
        batches = [batches[0], batches[1][:1], batches[2]]  # the middle one ends an epoch
    options = {"gradient_accumulation_steps": STEPS, **OPTIONS.get(option, {})}
    theirs = finished(make_model(), with_options(keras.optimizers.SGD, **OPTIONS.get(option, {})), big(batches))
    keras_own = finished(make_model(), with_options(keras.optimizers.SGD, **options), flat(batches))
    assert same(keras_own, theirs) == right


def test_what_the_docs_say_of_gradients_that_keras_loses():
    weight, other = keras.Variable(1.0), keras.Variable(1.0)
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer.apply([tf.constant(1.0)] * 2, [weight, other])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.constant(1.0), None], [weight, other])
    assert (weight.numpy(), other.numpy()) == (0.0, 1.0)


def test_what_the_docs_say_of_how_keras_counts_and_sums():
    weight, half = keras.Variable(0.0), keras.Variable(0.0, dtype="bfloat16")
    counting = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    assert int(counting.apply_gradients([(tf.constant(1.0), weight)])) == 1
    assert int(counting.iterations) == 0
    summing = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
    for value in (256.0, 1.0, 1.0, 2.0):
        summing.apply([tf.constant(value, "bfloat16")], [half])
    assert half.numpy() != -65.0
    with pytest.raises(ValueError, match=">= 2"):
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=1)
    traced = keras.optimizers.SGD(1.0, gradient_accumulation_steps=9)
    traced.build([weight])
    step = tf.function(lambda: traced.apply([tf.constant(1.0)], [weight]))
    step()
    traced.gradient_accumulation_steps = 2
    step()
    assert weight.numpy() == 0.0, "there was no update"


def test_constraints_are_applied_to_what_an_update_gave():
    options = {"kernel_constraint": keras.constraints.MaxNorm(0.5)}
    theirs = train(make_model(**options), plain_adam(), big(make_batches()))
    assert same(train(make_model(**options), adam(), flat(make_batches())), theirs)


def test_iterations_count_updates():
    optimizer = adam()
    model, seen = make_model(), []
    for micro_batch in flat(make_batches()):
        seen.append((int(optimizer.iterations), optimizer.accumulated, optimizer.will_step))
        train(model, optimizer, [micro_batch])
    assert seen == [(update, taken, taken == STEPS - 1) for update in range(UPDATES) for taken in range(STEPS)]
    assert int(optimizer.apply_gradients(zip(model.trainable_variables, model.trainable_variables, strict=True))) == 3


def test_hyperparameters_are_those_of_the_wrapped_optimizer():
    optimizer = adam(weight_decay=0.5, beta_1=0.8)
    assert (optimizer.weight_decay, optimizer.beta_1) == (0.5, 0.8)
    assert optimizer.name == optimizer.optimizer.name
    assert isinstance(optimizer.optimizer, keras.optimizers.Adam)
    optimizer.weight_decay, optimizer.beta_1, optimizer.learning_rate = 0.25, 0.7, 0.5
    wrapped = optimizer.optimizer
    assert (wrapped.weight_decay, wrapped.beta_1, float(wrapped.learning_rate)) == (0.25, 0.7, 0.5)
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such


def test_variables_that_are_excluded_from_weight_decay():
    def run(optimizer, stream):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
        return train(make_model(), optimizer, stream)

    theirs = run(keras.optimizers.AdamW(0.1, weight_decay=0.5), big(make_batches()))
    assert same(run(optimizers.AdamW(STEPS, 0.1, weight_decay=0.5), flat(make_batches())), theirs)


def test_optimizers_made_of_others(wanted):
    def made():
        choice = {"sequential.*": plain_adam()}
        return keras.optimizers.MultiOptimizer(lambda variable: choice["sequential.*"])

    model = train(make_model(), optimizers.Optimizer(made(), STEPS), flat(make_batches()))
    assert same(model, wanted)


# When steps are made


def test_flush_makes_the_step_of_the_remainder():
    batches = make_batches((4, 4, 4, 4, 2), updates=2)  # the second batch of an epoch: two micro-batches, one smaller
    halves = [half for epoch in batches for half in (epoch[:3], epoch[3:])]
    theirs, ours = train(make_model(), plain_adam(), big(halves)), make_model()
    optimizer = adam()
    assert not optimizer.flush(), "nothing yet"
    for epoch in batches:
        train(ours, optimizer, epoch, samples=True)
        assert optimizer.flush() is True
        assert optimizer.flush() is False, "nothing left"
    assert same(ours, theirs)


def test_steps_may_change_in_between():
    batches = make_batches((2,) * 5, updates=2)
    ours, optimizer = make_model(), adam(5)
    train(ours, optimizer, batches[0] + batches[1][:2])
    optimizer.steps = 2
    train(ours, optimizer, batches[1][2:])  # the first of these completes three, the others are two
    theirs = train(make_model(), plain_adam(), big([batches[0], batches[1][:3], batches[1][3:]]))
    assert same(ours, theirs)


def test_discard(wanted):
    model, optimizer = make_model(), adam()
    optimizer.discard()
    train(model, optimizer, make_batches()[1][:2])
    optimizer.discard()
    assert same(train(model, optimizer, flat(make_batches())), wanted)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_traced_once_even_if_steps_change(jit_compile):
    batches = make_batches((2,) * 6, updates=2)
    model, optimizer, traces = make_model(), adam(6), []
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit_compile)
    def step(inputs, labels, samples):
        traces.append(1)
        optimizer.apply(gradients(model, optimizer, inputs, labels), model.trainable_variables, samples=samples)

    for index, (inputs, labels) in enumerate(flat(batches)):
        optimizer.steps = 6 if index < 6 else 3
        step(tf.constant(inputs), tf.constant(labels), tf.constant(2))
    theirs = train(make_model(), plain_adam(), big([batches[0], batches[1][:3], batches[1][3:]]))
    assert same(model, theirs)
    assert len(traces) == 1


def test_flush_within_a_traced_function():
    model, optimizer = make_model(), adam()
    train(model, optimizer, make_batches()[0][:2])
    flush = tf.function(optimizer.flush)
    assert bool(flush())
    assert not bool(flush())
    assert same(model, train(make_model(), plain_adam(), big([make_batches()[0][:2]])))


# fit

MODES = {"graph": {"jit_compile": False}, "jit": {"jit_compile": True}, "eager": {"run_eagerly": True}}
MODES["several steps per execution"] = {"jit_compile": False, "steps_per_execution": 2}
WHOLE, REST = 24, 23


def fit(optimizer, batch_size, count, epochs=2, mode="graph", **kwargs):
    model = make_model()
    model.compile(optimizer, "mse", **MODES[mode])
    inputs, labels = make_data(count)
    model.history = model.fit(inputs, labels, batch_size, epochs, verbose=0, shuffle=False, **kwargs)
    return model


@pytest.fixture(scope="module")
def fitted():
    """What plain ``fit`` makes of batches of 10, 10 and 3."""
    return fit(plain_adam(), 10, REST, validation_data=make_data(8))


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow) if mode == "jit" else mode for mode in MODES]
)
def test_exact_epochs_of_fit(mode, fitted):
    exact = [callbacks.ExactEpochs()]
    model = fit(adam(2), 5, REST, mode=mode, callbacks=exact, validation_data=make_data(8) if mode == "graph" else None)
    assert int(model.optimizer.iterations) == 6
    assert same(model, fitted)
    if mode == "graph":  # validation sees the whole epoch
        assert np.allclose(model.history.history["val_loss"], fitted.history.history["val_loss"], rtol=1e-5)


def test_fit_without_the_callback_carries_on_and_loses_nothing():
    optimizer = adam(STEPS)
    model = fit(optimizer, 6, WHOLE)  # 2 epochs of 4: the second update has micro-batches of both, and 2 are left
    assert (int(optimizer.iterations), optimizer.accumulated) == (3, 0)
    inputs, labels = make_data(WHOLE)
    stream = [(inputs[start : start + 6], labels[start : start + 6]) for start in (0, 6, 12, 18)] * 2
    theirs = train(make_model(), plain_adam(), big([stream[:3], stream[3:6], stream[6:]]))
    assert same(model, theirs, 1e-6), "fit computes the loss in single precision"


def test_the_callback_in_a_later_fit_and_with_another_optimizer(fitted):
    inputs, labels = make_data(REST)
    model = fit(adam(2), 5, REST, epochs=0)
    train(model, model.optimizer, [(inputs[:5], labels[:5])])
    model.set_weights(make_model().get_weights())
    model.compile(adam(2), "mse", jit_compile=False)
    for _ in range(2):
        model.fit(inputs, labels, 5, verbose=0, shuffle=False, callbacks=[callbacks.ExactEpochs()])
    assert same(model, fitted)
    model.compile(plain_adam(), "mse", jit_compile=False)
    model.fit(inputs, labels, 5, verbose=0)  # goes on without


def test_learning_rate_callbacks_count_epochs():
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 2))
    theirs = fit(plain_adam(), 12, WHOLE, callbacks=[schedule])
    ours = fit(adam(2), 6, WHOLE, callbacks=[schedule])
    assert float(ours.optimizer.learning_rate) == pytest.approx(0.1 / 6)
    assert same(ours, theirs)


def test_callbacks_that_look_for_the_average_of_weights():
    swap = [keras.callbacks.SwapEMAWeights()]
    options = {"use_ema": True, "ema_momentum": 0.5}
    theirs = fit(plain_adam(**options), 12, WHOLE, callbacks=swap, validation_data=make_data(8))
    ours = fit(adam(2, **options), 6, WHOLE, callbacks=swap, validation_data=make_data(8))
    assert same(ours, theirs)
    assert np.allclose(ours.history.history["val_loss"], theirs.history.history["val_loss"], rtol=1e-5)


# Mixed precision


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def test_fit_in_mixed_precision(mixed_float16):
    def run(optimizer, batch_size, **kwargs):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.compile(optimizer, "mse", jit_compile=False, **kwargs)
        inputs, labels = make_data(16, "float32")
        exact = [callbacks.ExactEpochs()] if batch_size == 4 else []
        model.fit(inputs, labels, batch_size, epochs=2, verbose=0, shuffle=False, callbacks=exact)
        return model

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)

    theirs = run(scaled(), 8)
    for optimizer in (
        keras.optimizers.LossScaleOptimizer(optimizers.SGD(2, 0.1), initial_scale=1024.0),
        optimizers.SGD(2, 0.1),  # Keras puts one around it
    ):
        model = run(optimizer, 4)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert same(model, theirs, 1e-3), "half precision rounds"
        assert int(model.optimizer.iterations) == 4
    inside = run(optimizers.Optimizer(scaled(), 2), 4, auto_scale_loss=False)
    assert same(inside, theirs, 1e-3)
    with pytest.raises(UserError, match="auto_scale_loss=False"):
        run(optimizers.Optimizer(scaled(), 2), 4)


def with_overflow(optimizer, broken):
    """Train on all micro-batches, of which one has no finite gradient."""
    model = make_model()
    for index, (inputs, labels) in enumerate(flat(make_batches())):
        factor = float("inf") if index == broken else 1.0
        optimizer.apply([g * factor for g in gradients(model, optimizer, inputs, labels)], model.trainable_variables)
    return model


@pytest.mark.parametrize("broken", [3, 5])
def test_an_overflow_inside_skips_the_whole_update_and_only_that(broken):
    scaler = keras.optimizers.LossScaleOptimizer(plain_adam(), initial_scale=1024.0)
    model = with_overflow(optimizers.Optimizer(scaler, STEPS), broken)
    batches = make_batches()
    assert same(model, train(make_model(), plain_adam(), big([batches[0], batches[2]])))
    assert float(scaler.dynamic_scale) == 512.0


def test_an_overflow_outside_leaves_its_micro_batch_out():
    optimizer = adam()
    model = with_overflow(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0), 4)
    assert optimizer.flush()
    stream = flat(make_batches())
    del stream[4]
    assert same(model, train(make_model(), plain_adam(), big([stream[:3], stream[3:6], stream[6:]])))


# State

INPUTS, LABELS = make_data(WHOLE)


@pytest.mark.parametrize("make", [lambda: adam(4), lambda: optimizers.Optimizer(plain_adam(), 4)])
@pytest.mark.parametrize("taken", [0, 3])
def test_going_on_from_a_saved_model_also_in_the_middle(make, taken, tmp_path):
    model = make_model()
    model.compile(make(), "mse", jit_compile=False)
    stream = flat(make_batches((2,) * 4))
    train(model, model.optimizer, stream[: 4 + taken])
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert type(other.optimizer) is type(model.optimizer)
    assert (other.optimizer.steps, other.optimizer.accumulated, int(other.optimizer.iterations)) == (4, taken, 1)
    train(other, other.optimizer, stream[4 + taken :])
    assert same(other, train(make_model(), plain_adam(), big(make_batches((2,) * 4))))


def test_a_loaded_remainder_can_be_flushed(tmp_path):
    model = make_model()
    model.compile(adam(), "mse")
    train(model, model.optimizer, make_batches()[0][:2])
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert other.optimizer.flush()
    assert same(other, train(make_model(), plain_adam(), big([make_batches()[0][:2]])))


def test_loaded_weights_do_not_bring_their_steps(tmp_path):
    model, other = make_model(), make_model()
    model.compile(adam(4), "mse")
    other.compile(adam(2), "mse")
    other.optimizer.build(other.trainable_variables)
    stream = flat(make_batches((2,) * 6, updates=1))
    train(model, model.optimizer, stream[:3])
    model.save_weights(tmp_path / "of.weights.h5")
    other.load_weights(tmp_path / "of.weights.h5")
    assert (other.optimizer.steps, other.optimizer.accumulated) == (2, 3)
    train(other, other.optimizer, stream[3:])  # the first completes four, the others are two
    assert same(other, train(make_model(), plain_adam(), big([stream[:4], stream[4:]])))


def test_weights_are_exchanged_with_keras(tmp_path, recwarn):
    path = tmp_path / "of.weights.h5"
    batches = make_batches()
    theirs, ours = make_model(), make_model()
    theirs.compile(plain_adam(), "mse")
    ours.compile(adam(), "mse")
    train(theirs, theirs.optimizer, big(batches[:1]))
    theirs.save_weights(path)
    train(ours, ours.optimizer, batches[2][:1])  # dropped
    ours.load_weights(path)
    train(ours, ours.optimizer, batches[1])
    ours.save_weights(path)
    plain = make_model()
    plain.compile(plain_adam(), "mse")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(path)
    train(plain, plain.optimizer, big(batches[2:]))
    train(theirs, theirs.optimizer, big(batches[1:]))
    assert same(plain, theirs)
    assert not [warning for warning in recwarn if "variable loading" in str(warning.message)]


def test_all_variables_are_the_state():
    stream = flat(make_batches())
    first, second, optimizer, other = make_model(), make_model(), adam(), adam()
    train(first, optimizer, stream[:4])
    other.build(second.trainable_variables)
    second.set_weights(first.get_weights())
    other.set_weights([variable.numpy() for variable in optimizer.variables])
    train(first, optimizer, stream[4:])
    train(second, other, stream[4:])
    assert same(second, first, 0.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        adam(beta_1=0.8),
        optimizers.SGD(STEPS, DECAY(0.1, 5, 0.5)),
        optimizers.Optimizer(keras.optimizers.SGD(DECAY(0.1, 5, 0.5), clipnorm=0.5), STEPS),
        optimizers.Optimizer(keras.optimizers.LossScaleOptimizer(plain_adam()), STEPS),
    ],
)
def test_configurations(optimizer):
    config = optimizer.get_config()
    made = type(optimizer).from_config(config)
    assert made.get_config() == config
    assert made.steps == STEPS
    assert type(optimizer).from_config({**config, "steps": 7}).steps == 7
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(back) is type(optimizer)
    assert back.get_config() == config
    back = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(back) is type(optimizer)


# Mistakes


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, "at least 1, not 0"),
        (-2, "at least 1, not -2"),
        (2.0, "a whole number of at least 1, not 2.0"),
        (True, "not True"),
        ("4", "not '4'"),
        (None, "not None"),
        (DECAY(0.1, 1, 0.5), "not a ExponentialDecay"),
    ],
)
def test_steps_that_make_no_sense(steps, text):
    optimizer = adam()
    for call in (
        lambda: optimizers.Optimizer(plain_adam(), steps),
        lambda: optimizers.SGD(steps, 0.1),
        lambda: optimizers.SGD(0.1, steps=steps),
        lambda: setattr(optimizer, "steps", steps),
    ):
        with pytest.raises(UserError, match=re.escape(text)) as error:
            call()
        assert isinstance(error.value, ValueError)
        assert "\n" not in str(error.value)
    assert optimizer.steps == STEPS


class TorchOptimizer:
    __module__ = "torch.optim.adam"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: optimizers.SGD(), "needs steps"),
        (lambda: optimizers.SGD(learning_rate=0.1), "needs steps"),
        (
            lambda: optimizers.Optimizer(TorchOptimizer(), 2),
            "a Keras 3 optimizer, not a torch.optim.adam.TorchOptimizer",
        ),
        (lambda: optimizers.Optimizer("adam", 2), "not a builtins.str"),
        (lambda: optimizers.Optimizer(adam(), 2), "over 3 micro-batches: wrap it once"),
        (lambda: adam(gradient_accumulation_steps=4), "over 4 micro-batches: leave out gradient_accumulation_steps"),
        (lambda: optimizers.Optimizer(keras.optimizers.LossScaleOptimizer(adam()), 2), "wrap it once"),
        (lambda: adam().apply([1.0, 2.0], [keras.Variable(1.0)]), "2 gradients were given for 1 variables"),
    ],
)
def test_wrong_calls(call, text):
    with pytest.raises(ValueError, match=text) as error:
        call()
    assert "\n" not in str(error.value)


def test_variables_that_the_optimizer_does_not_know():
    optimizer = adam()
    with pytest.raises(UserError, match="call build"):
        optimizer.apply([1.0])
    optimizer.build([keras.Variable(1.0)])
    with pytest.raises(UserError, match="not built with the variable 'other'"):
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0, name="other")])
    with pytest.raises(UserError, match="no gradient"):
        optimizer.apply([None])


@pytest.mark.parametrize("samples", [0, -1, float("nan"), float("inf"), True, "4"])
def test_sizes_that_make_no_sense(samples):
    with pytest.raises(ValueError, match="the size of the micro-batch"):
        adam().apply([tf.constant(1.0)], [keras.Variable(1.0)], samples=samples)


def test_sizes_for_some_micro_batches_only():
    optimizer, weights = adam(), [keras.Variable(1.0)]
    optimizer.apply([tf.constant(1.0)], weights, samples=4)
    with pytest.raises(UserError, match="to every micro-batch"):
        optimizer.apply([tf.constant(1.0)], weights)
    optimizer.flush()
    optimizer.apply([tf.constant(1.0)], weights)


def test_a_gradient_that_a_traced_update_would_leave_out():
    optimizer, weights = adam(1), [keras.Variable(1.0, name="first"), keras.Variable(1.0, name="second")]
    optimizer.build(weights)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        tf.function(lambda: optimizer.apply([tf.constant(1.0)], weights[:1]))()
    with pytest.raises(UserError, match="'second' had no gradient when"):
        optimizer.apply([tf.constant(1.0)], weights[1:])


def test_the_callback_without_an_accumulating_optimizer():
    with pytest.raises(UserError, match=r"elasticdl\.ga\.keras\.optimizers, not with a Adam"):
        fit(plain_adam(), 4, WHOLE, callbacks=[callbacks.ExactEpochs()])


def test_where_it_does_not_work(monkeypatch):
    class Strategy:
        num_replicas_in_sync = 2

    made = plain_adam()
    with monkeypatch.context() as patch:
        patch.setattr(tf.distribute, "get_strategy", Strategy)
        with pytest.raises(UserError, match=r"without tf\.distribute"):
            optimizers.Optimizer(made, 2)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match="on TensorFlow, not on jax"):
        optimizers.Optimizer(made, 2)


def test_the_ways_to_give_steps():
    made = [optimizers.SGD(5, 0.25), optimizers.SGD(0.25, steps=5), optimizers.SGD(steps=5, learning_rate=0.25)]
    plain = keras.optimizers.SGD
    made += [optimizers.Optimizer(plain(0.25), 5), optimizers.Optimizer(plain(0.25), steps=5)]
    assert {(optimizer.steps, float(optimizer.learning_rate)) for optimizer in made} == {(5, 0.25)}


# On its own


@pytest.mark.slow
def test_it_needs_tensorflow_and_nothing_else():
    code = """
import sys
for name in ("horovod", "grpc", "pydantic", "elasticdl.elastic", "elasticdl.proto"):
    sys.modules[name] = None  # an import raises
import elasticdl.ga.keras
import keras, tensorflow as tf
weight = keras.Variable(0.0)
optimizer = elasticdl.ga.keras.optimizers.SGD(2, 1.0)
for gradient in (1.0, 2.0):
    optimizer.apply([tf.constant(gradient)], [weight])
assert weight.numpy() == -1.5, weight
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example():
    command = [sys.executable, str(ROOT / "examples" / "accumulate_keras.py"), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"epoch \d+: accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 50
