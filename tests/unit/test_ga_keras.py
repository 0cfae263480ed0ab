"""What else accumulation is with Keras: embeddings, options, traced functions, ``fit``, half precision, and what is saved."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ga_kit import STEPS, Keras, big, flat, make_batches, make_data
from refusal_kit import refused

from elasticdl.ga.keras import callbacks, optimizers

WHOLE, REST = 24, 23
DECAY = keras.optimizers.schedules.ExponentialDecay


def adam(steps=STEPS, **options):
    return optimizers.Adam(steps, learning_rate=0.1, **options)


def plain_adam(**options):
    return keras.optimizers.Adam(learning_rate=0.1, **options)


def by(optimizer):
    """A training by this optimizer."""
    return Keras(optimizer=lambda _: optimizer)


def test_every_optimizer_of_keras_is_there_but_those_made_of_others():
    theirs = {name for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    assert set(optimizers.__all__) == theirs - {"LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}


@pytest.mark.parametrize(("name", "twice"), [("SGD", True), ("Adam", True), ("Ftrl", False)])
def test_embeddings_whose_gradients_are_rows(name, twice):
    def run(optimizer, parts, dense=False):
        table = keras.Variable(np.linspace(-1, 1, 32).reshape(8, 4), dtype="float64")
        for rows, labels in parts:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.gather(table.value, rows) - labels))
            gradient = tape.gradient(loss, table.value)
            optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], [table])
        return table.numpy()

    rows, labels = np.array([1, 5, 5 if twice else 2, 0, 4, 3] * 2), make_data(12)[1]
    batches = [[(rows[i : i + 2], labels[i : i + 2]) for i in (start, start + 2, start + 4)] for start in (0, 6)]
    # Keras takes the square of each row before it adds those that are the same.
    theirs = run(getattr(keras.optimizers, name)(), big(batches), dense=twice)
    assert np.allclose(run(getattr(optimizers, name)(STEPS), flat(batches)), theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.1},
        {"weight_decay": 0.3},
        {"weight_decay": 0.5, "excluded": ["kernel"]},
        {"learning_rate": DECAY(0.1, 1, 0.5)},
        {"use_ema": True, "ema_momentum": 0.6},
        {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_act_on_big_batches(options):
    def run(kind, *steps, stream, excluded=(), **options):
        optimizer = kind(*steps, **{"learning_rate": 0.1, **options})
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=excluded)
        training = by(optimizer).train(stream)
        optimizer.finalize_variable_values(training.variables)
        return training

    batches = make_batches()
    theirs = run(keras.optimizers.SGD, stream=big(batches), **options)
    assert run(optimizers.SGD, STEPS, stream=flat(batches), **options).same(theirs)
    assert not theirs.same(run(keras.optimizers.SGD, stream=big(batches)), 1e-3), "the option does something"


def test_hyperparameters_are_those_of_the_wrapped_optimizer():
    optimizer = adam(weight_decay=0.5, beta_1=0.8)
    wrapped = optimizer.optimizer
    assert (optimizer.weight_decay, optimizer.beta_1, optimizer.name) == (0.5, 0.8, wrapped.name)
    optimizer.weight_decay, optimizer.beta_1, optimizer.learning_rate = 0.25, 0.7, 0.5
    assert (wrapped.weight_decay, wrapped.beta_1, float(wrapped.learning_rate)) == (0.25, 0.7, 0.5)
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such


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


# -- fit --


MODES = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "several steps per execution": {"jit_compile": False, "steps_per_execution": 2},
}
EXACTLY = {"verbose": 0, "shuffle": False}


def fit(optimizer, batch_size, count, epochs=2, mode="graph", **options):
    training = by(optimizer)
    model = training.model
    model.compile(optimizer, "mse", **MODES[mode])
    training.history = model.fit(*make_data(count), batch_size, epochs, **EXACTLY, **options).history
    return training


@pytest.mark.parametrize("mode", MODES)
def test_exact_epochs_of_fit(mode):
    """Of batches of 10, 10 and 3, before each evaluation; also of a model that was compiled anew."""
    validated = {"validation_data": make_data(8)}
    theirs = fit(plain_adam(), 10, REST, **validated)
    ours = fit(adam(2), 5, REST, mode=mode, callbacks=[callbacks.ExactEpochs()], **validated)
    assert int(ours.optimizer.iterations) == 6
    assert ours.same(theirs)
    assert np.allclose(ours.history["val_loss"], theirs.history["val_loss"], rtol=1e-5)
    ours.model.compile(plain_adam(), "mse", **MODES[mode])
    ours.model.fit(*make_data(REST), 5, verbose=0)  # goes on without


def test_fit_without_the_callback_carries_on_and_loses_nothing():
    ours = fit(adam(), 6, WHOLE)  # 2 epochs of 4: the second update has micro-batches of both, and 2 are left
    assert (int(ours.optimizer.iterations), ours.optimizer.accumulated) == (3, 0)
    inputs, labels = make_data(WHOLE)
    stream = [(inputs[start : start + 6], labels[start : start + 6]) for start in (0, 6, 12, 18)] * 2
    theirs = Keras.plain([stream[:3], stream[3:6], stream[6:]])
    assert ours.same(theirs, 1e-6), "fit computes the loss in single precision"


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
        training.model.fit(*make_data(16, "float32"), batch_size, epochs=2, callbacks=exact, **EXACTLY)
        return training

    def scaled(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)

    theirs = run(scaled(keras.optimizers.SGD(0.1)), 8)
    around, inside = optimizers.SGD(2, 0.1), optimizers.Optimizer(scaled(keras.optimizers.SGD(0.1)), 2)
    for ours in (run(around, 4), run(inside, 4, auto_scale_loss=False)):  # around the first one Keras puts a scaler
        assert ours.same(theirs, 1e-3), "half precision rounds"
        assert int(ours.model.optimizer.iterations) == 4
    refused("auto_scale_loss=False", lambda: run(optimizers.Optimizer(scaled(keras.optimizers.SGD(0.1)), 2), 4))


# -- what is saved --


def test_going_on_from_a_saved_model_also_in_the_middle(tmp_path):
    training, other, stream = by(adam()), Keras(), flat(make_batches())
    training.model.compile(training.optimizer, "mse", jit_compile=False)
    training.train(stream[: STEPS + 2])
    training.model.save(tmp_path / "model.keras")
    other.model = keras.models.load_model(tmp_path / "model.keras")
    other.optimizer = other.model.optimizer
    assert type(other.optimizer) is optimizers.Optimizer
    assert (other.optimizer.steps, other.optimizer.accumulated, int(other.optimizer.iterations)) == (STEPS, 2, 1)
    assert other.train(stream[STEPS + 2 :]).same(Keras.plain(make_batches()))


def test_weights_are_exchanged_with_keras(tmp_path):
    path, batches = tmp_path / "of.weights.h5", make_batches(updates=3)
    theirs, ours, plain = Keras(steps=None), Keras(), Keras(steps=None)
    for each in (theirs, ours, plain):
        each.model.compile(each.optimizer, "mse")
        each.optimizer.build(each.variables)
    theirs.train(big(batches[:1])).model.save_weights(path)
    ours.train(batches[2][:1]).model.load_weights(path)  # what it had taken is dropped
    ours.train(batches[1]).model.save_weights(path)
    plain.model.load_weights(path)
    assert plain.train(big(batches[2:])).same(theirs.train(big(batches[1:])))


@pytest.mark.parametrize(
    "optimizer", [optimizers.SGD(STEPS, DECAY(0.1, 5, 0.5)), optimizers.Optimizer(plain_adam(), STEPS)]
)
def test_configurations(optimizer):
    config = optimizer.get_config()
    for made in (
        type(optimizer).from_config(config),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert (type(made), made.get_config(), made.steps) == (optimizers.Optimizer, config, STEPS)
