"""Accumulated micro-batches against the one big batch that Keras itself is given."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusal_kit import refused

from elasticdl.common.errors import UserError
from elasticdl.ga.keras import optimizers

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


def plain(batches):
    """What is wanted: Keras alone, whole batches."""
    return train(make_model(), plain_adam(), big(batches))


def same(model, wanted, tolerance=1e-12):
    return difference(model, wanted) <= tolerance


def adam(steps=STEPS, **kwargs):
    return optimizers.Adam(steps, learning_rate=0.1, **kwargs)


def plain_adam(**kwargs):
    return keras.optimizers.Adam(learning_rate=0.1, **kwargs)


@pytest.fixture(scope="module")
def wanted():
    """The model that Adam gives on the whole batches."""
    return plain(make_batches())


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


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_without_gradient_in_some_or_all_micro_batches():
    def run(optimizer, batches):
        weights = [keras.Variable(np.ones(2), dtype="float64", name=name) for name in "abc"]
        for factors in batches:
            given = [factor and weight * factor for factor, weight in zip(factors, weights, strict=True)]
            optimizer.apply(given, weights)
        return [weight.numpy().tolist() for weight in weights]

    options = {"learning_rate": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    ours = run(optimizers.SGD(2, **options), [(2, None, None)] * 2 + [(None, 2, None), (1, 1, None)])
    theirs = run(keras.optimizers.SGD(**options), [(2, None, None), (0.5, 1.5, None)])
    assert np.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert ours[2] == [1.0, 1.0], "no gradient at all: not even weight decay"


def test_half_precision_is_summed_in_single():
    weight = keras.Variable(0.0, dtype="bfloat16")
    optimizer = optimizers.SGD(4, 1.0)
    for value in (256.0, 1.0, 1.0, 2.0):  # in bfloat16 the sum would stay 256, but for the last
        optimizer.apply([tf.constant(value, "bfloat16")], [weight])
    assert weight.numpy() == -65.0


def test_scales_of_float8_are_refused():
    scale = keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    with pytest.raises(UserError, match="is a scale of float8") as error:
        optimizers.SGD(3, 1.0).build([scale])
    assert "\n" not in str(error.value)


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


# When steps are made


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
    theirs = plain([batches[0], batches[1][:3], batches[1][3:]])
    assert same(model, theirs)
    assert len(traces) == 1


def test_flush_within_a_traced_function():
    model, optimizer = make_model(), adam()
    train(model, optimizer, make_batches()[0][:2])
    flush = tf.function(optimizer.flush)
    assert bool(flush())
    assert not bool(flush())
    assert same(model, plain([make_batches()[0][:2]]))


# Mistakes


def test_variables_that_the_optimizer_does_not_know():
    optimizer = adam()
    refused("call build", lambda: optimizer.apply([1.0]))
    optimizer.build([keras.Variable(1.0)])
    with pytest.raises(UserError, match="not built with the variable 'other'"):
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0, name="other")])
    refused("no gradient", lambda: optimizer.apply([None]))


def test_a_gradient_that_a_traced_update_would_leave_out():
    optimizer, weights = adam(1), [keras.Variable(1.0, name="first"), keras.Variable(1.0, name="second")]
    optimizer.build(weights)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        tf.function(lambda: optimizer.apply([tf.constant(1.0)], weights[:1]))()
    refused("'second' had no gradient when", lambda: optimizer.apply([tf.constant(1.0)], weights[1:]))


def test_where_it_does_not_work(monkeypatch):
    class Strategy:
        num_replicas_in_sync = 2

    made = plain_adam()
    with monkeypatch.context() as patch:
        patch.setattr(tf.distribute, "get_strategy", Strategy)
        refused(r"without tf\.distribute", lambda: optimizers.Optimizer(made, 2))
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    refused("on TensorFlow, not on jax", lambda: optimizers.Optimizer(made, 2))
