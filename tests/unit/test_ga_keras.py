"""What else accumulation is with Keras: embeddings, options, traced functions, ``fit``, half precision, and what is saved."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ga_kit import STEPS, Keras, big, flat, make_batches, make_data
from refusal_kit import refused

from elasticdl.common.errors import UserError
from elasticdl.ga.keras import callbacks, optimizers

WHOLE, REST = 24, 23
INPUTS, LABELS = make_data(REST)
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


def test_scales_of_float8_are_refused():
    scale = keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    refused("is a scale of float8", lambda: optimizers.SGD(3, 1.0).build([scale]))


# -- what acts on the gradient of the whole batch, and what counts optimizer steps --


OPTIONS = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "weight_decay": {"weight_decay": 0.3},
    "loss scale": {"loss_scale_factor": 1024.0},
    "schedule": {"learning_rate": DECAY(0.1, 1, 0.5)},
    "average": {"use_ema": True, "ema_momentum": 0.6},
    "average that overwrites": {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3},
    "excluded": {"weight_decay": 0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_act_on_big_batches(option):
    def run(kind, *steps, stream, **options):
        optimizer = kind(*steps, **{"learning_rate": 0.1, **options})
        if option == "excluded":
            optimizer.exclude_from_weight_decay(var_names=["kernel"])
        training = by(optimizer).train(stream)
        optimizer.finalize_variable_values(training.variables)
        return training

    batches = make_batches()
    theirs = run(keras.optimizers.SGD, stream=big(batches), **OPTIONS[option])
    assert run(optimizers.SGD, STEPS, stream=flat(batches), **OPTIONS[option]).same(theirs)
    if option != "loss scale":
        without = run(keras.optimizers.SGD, stream=big(batches))
        assert not theirs.same(without, 1e-3), "the option does something"


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


# -- traced functions --


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

    for index, (inputs, labels) in enumerate(flat(batches)):
        optimizer.steps = 6 if index < 6 else 3
        step(tf.constant(inputs), tf.constant(labels), tf.constant(2))
    assert training.same(Keras.plain([batches[0], batches[1][:3], batches[1][3:]]))
    assert len(traces) == 1


def test_flush_within_a_traced_function():
    some = make_batches()[0][:2]
    training = Keras().train(some)
    flush = tf.function(training.optimizer.flush)
    assert bool(flush())
    assert not bool(flush())
    assert training.same(Keras.plain([some]))


def test_variables_that_the_optimizer_does_not_know():
    optimizer = adam()
    optimizer.discard()
    assert not optimizer.flush(), "there is nothing yet"
    refused("call build", lambda: optimizer.apply([1.0]))
    optimizer.build([keras.Variable(1.0)])
    other = [keras.Variable(1.0, name="other")]
    refused("not built with the variable 'other'", lambda: optimizer.apply([tf.constant(1.0)], other))
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


# -- fit --


MODES = {"graph": {"jit_compile": False}, "jit": {"jit_compile": True}, "eager": {"run_eagerly": True}}
MODES["several steps per execution"] = {"jit_compile": False, "steps_per_execution": 2}
EXACTLY = {"verbose": 0, "shuffle": False}


def fit(optimizer, batch_size, count, epochs=2, mode="graph", **options):
    training = by(optimizer)
    model = training.model
    model.compile(optimizer, "mse", **MODES[mode])
    training.history = model.fit(*make_data(count), batch_size, epochs, **EXACTLY, **options).history
    return training


@pytest.fixture(scope="module")
def fitted():
    """What plain ``fit`` makes of batches of 10, 10 and 3."""
    return fit(plain_adam(), 10, REST, validation_data=make_data(8))


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow) if mode == "jit" else mode for mode in MODES]
)
def test_exact_epochs_of_fit(mode, fitted):
    validation = make_data(8) if mode == "graph" else None
    ours = fit(adam(2), 5, REST, mode=mode, callbacks=[callbacks.ExactEpochs()], validation_data=validation)
    assert int(ours.optimizer.iterations) == 6
    assert ours.same(fitted)
    if validation:  # it sees the whole epoch
        assert np.allclose(ours.history["val_loss"], fitted.history["val_loss"], rtol=1e-5)


def test_fit_without_the_callback_carries_on_and_loses_nothing():
    ours = fit(adam(), 6, WHOLE)  # 2 epochs of 4: the second update has micro-batches of both, and 2 are left
    assert (int(ours.optimizer.iterations), ours.optimizer.accumulated) == (3, 0)
    inputs, labels = make_data(WHOLE)
    stream = [(inputs[start : start + 6], labels[start : start + 6]) for start in (0, 6, 12, 18)] * 2
    theirs = Keras.plain([stream[:3], stream[3:6], stream[6:]])
    assert ours.same(theirs, 1e-6), "fit computes the loss in single precision"


def test_the_callback_in_a_later_fit_and_with_another_optimizer(fitted):
    ours = fit(adam(2), 5, REST, epochs=0).train([(INPUTS[:5], LABELS[:5])])
    model = ours.model
    model.set_weights(Keras.make_model().get_weights())
    model.compile(adam(2), "mse", jit_compile=False)
    for _ in range(2):
        model.fit(INPUTS, LABELS, 5, callbacks=[callbacks.ExactEpochs()], **EXACTLY)
    assert ours.same(fitted)
    model.compile(plain_adam(), "mse", jit_compile=False)
    model.fit(INPUTS, LABELS, 5, verbose=0)  # goes on without


def test_callbacks_that_look_for_the_average_of_weights():
    options = {"use_ema": True, "ema_momentum": 0.5}
    told = {"callbacks": [keras.callbacks.SwapEMAWeights()], "validation_data": make_data(8)}
    theirs, ours = fit(plain_adam(**options), 12, WHOLE, **told), fit(adam(2, **options), 6, WHOLE, **told)
    assert ours.same(theirs)
    assert np.allclose(ours.history["val_loss"], theirs.history["val_loss"], rtol=1e-5)


def test_the_callback_without_an_accumulating_optimizer():
    with pytest.raises(UserError, match=r"elasticdl\.ga\.keras\.optimizers, not with a Adam"):
        fit(plain_adam(), 4, WHOLE, callbacks=[callbacks.ExactEpochs()])


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

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)

    theirs = run(scaled(), 8)
    for optimizer in (
        keras.optimizers.LossScaleOptimizer(optimizers.SGD(2, 0.1), initial_scale=1024.0),
        optimizers.SGD(2, 0.1),  # Keras puts one around it
    ):
        ours = run(optimizer, 4)
        assert isinstance(ours.model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert ours.same(theirs, 1e-3), "half precision rounds"
        assert int(ours.model.optimizer.iterations) == 4
    assert run(optimizers.Optimizer(scaled(), 2), 4, auto_scale_loss=False).same(theirs, 1e-3)
    refused("auto_scale_loss=False", lambda: run(optimizers.Optimizer(scaled(), 2), 4))


# -- what is saved --


@pytest.mark.parametrize("make", [adam, lambda: optimizers.Optimizer(plain_adam(), STEPS)])
def test_going_on_from_a_saved_model_also_in_the_middle(make, tmp_path):
    training, other, stream = by(make()), Keras(), flat(make_batches())
    training.model.compile(training.optimizer, "mse", jit_compile=False)
    training.train(stream[: STEPS + 2])
    training.model.save(tmp_path / "model.keras")
    other.model = keras.models.load_model(tmp_path / "model.keras")
    other.optimizer = other.model.optimizer
    assert type(other.optimizer) is optimizers.Optimizer
    assert (other.optimizer.steps, other.optimizer.accumulated, int(other.optimizer.iterations)) == (STEPS, 2, 1)
    assert other.train(stream[STEPS + 2 :]).same(Keras.plain(make_batches()))


def test_weights_are_exchanged_with_keras(tmp_path, recwarn):
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
    assert not [warning for warning in recwarn if "variable loading" in str(warning.message)]


def test_all_variables_are_the_state():
    stream = flat(make_batches())
    first, second = Keras().train(stream[:4]), Keras()
    second.optimizer.build(second.variables)
    second.model.set_weights(first.model.get_weights())
    second.optimizer.set_weights([variable.numpy() for variable in first.optimizer.variables])
    assert second.train(stream[4:]).same(first.train(stream[4:]), 0.0)


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
    for made in (
        type(optimizer).from_config(config),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert (type(made), made.get_config(), made.steps) == (optimizers.Optimizer, config, STEPS)
