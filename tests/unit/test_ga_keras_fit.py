"""Accumulation in ``fit``, in half precision, and what is saved."""

import keras
import numpy as np
import pytest
from refusal_kit import refused
from test_ga_keras import (
    DECAY,
    STEPS,
    adam,
    big,
    flat,
    gradients,
    make_batches,
    make_data,
    make_model,
    plain,
    plain_adam,
    same,
    train,
)

from elasticdl.common.errors import UserError
from elasticdl.ga.keras import callbacks, optimizers

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
    theirs = plain([stream[:3], stream[3:6], stream[6:]])
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


def test_what_was_accumulated_before_fit_is_stepped_before_it():
    x, y = make_data(20)
    theirs = train(make_model(), plain_adam(), [(x[:5], y[:5]), (x[:10], y[:10]), (x[10:], y[10:])])
    model = make_model()
    model.compile(adam(2), "mse", run_eagerly=True)
    train(model, model.optimizer, [(x[:5], y[:5])])
    model.fit(x, y, 5, verbose=0, shuffle=False, callbacks=[callbacks.ExactEpochs()])
    assert int(model.optimizer.iterations) == 3
    assert same(model, theirs, 1e-6), "fit computes the loss in single precision"


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
    refused("auto_scale_loss=False", lambda: run(optimizers.Optimizer(scaled(), 2), 4))


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
    assert same(model, plain([batches[0], batches[2]]))
    assert float(scaler.dynamic_scale) == 512.0


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
    assert type(other.optimizer) is optimizers.Optimizer
    assert (other.optimizer.steps, other.optimizer.accumulated, int(other.optimizer.iterations)) == (4, taken, 1)
    train(other, other.optimizer, stream[4 + taken :])
    assert same(other, plain(make_batches((2,) * 4)))


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
    assert same(other, plain([stream[:4], stream[4:]]))


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
    for made in (
        type(optimizer).from_config(config),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert (type(made), made.get_config(), made.steps) == (optimizers.Optimizer, config, STEPS)


def test_the_callback_without_an_accumulating_optimizer():
    with pytest.raises(UserError, match=r"elasticdl\.ga\.keras\.optimizers, not with a Adam"):
        fit(plain_adam(), 4, WHOLE, callbacks=[callbacks.ExactEpochs()])
