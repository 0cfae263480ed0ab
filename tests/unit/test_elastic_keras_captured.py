"""Variables that are not the model's: those that model and loss read belong to the state, and none may be changed by them."""

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import pytest
import tensorflow as tf
from elastic_fit_kit import (
    Fitting,
    assert_as_plain,
    data_of,
    dense,
    fit_together,
    fit_with_a_newcomer,
    numbers,
    plainly,
)

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.fit_data import check_compiled

X, Y = numbers()


class Anneal(keras.callbacks.Callback):
    def __init__(self, weight, begins=True):
        super().__init__()
        self.anneal = weight.assign
        if not begins:
            self.on_epoch_begin = super().on_epoch_begin

    def on_epoch_begin(self, epoch, logs=None):
        self.anneal(epoch / 2)


def annealed(make):
    """A model whose loss closes over a variable, and that."""
    weight = make()

    def loss(labels, outputs):
        return tf.square(labels - outputs) + keras.ops.convert_to_tensor(weight) * tf.abs(outputs)

    return dense(loss=loss), weight


@pytest.mark.parametrize("make", [lambda: tf.Variable(0.0), lambda: keras.Variable(0.0)], ids=["tensorflow", "keras"])
@pytest.mark.parametrize("begins", [True, False], ids=["tells newcomers", "sends"])
def test_a_newcomer_s_loss_is_that_of_the_others(make, begins):
    """Also where its callback would not set the variable."""
    model, weight = annealed(make)
    plain = plainly(model, X, Y, [Anneal(weight)])

    def fitting(rank):
        model, weight = annealed(make)
        return Fitting(model, data_of(X, Y), [Anneal(weight, begins or rank == 0)])

    members = fit_with_a_newcomer(fitting, joins_after=10)
    assert_as_plain(members, plain)
    np.testing.assert_allclose([float(member.fit.state.train_step.captured[0]) for member in members], 1.0)


class Slowing(keras.optimizers.SGD):
    """Counts in a variable of TensorFlow's."""

    def build(self, variables):
        super().build(variables)
        self.count = tf.Variable(0.0, trainable=False)

    def apply(self, grads, trainable_variables=None):
        self.count.assign_add(1.0)
        super().apply([each / self.count for each in grads], trainable_variables)


def test_what_an_optimizer_keeps_in_variables_of_tensorflow_s_goes_to_a_newcomer():
    def fitting(rank):
        return Fitting(dense(optimizer=Slowing(0.02)), data_of(X, Y))

    (alone,) = fit_together(1, fitting)
    assert int(alone.model.optimizer.count) == 12
    for member in fit_with_a_newcomer(fitting, joins_after=5):
        assert int(member.model.optimizer.count) == 12
        for one, other in zip(member.weights(), alone.weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_captured_variables_are_in_a_checkpoint():
    model, weight = annealed(lambda: tf.Variable(0.0))
    (member,) = fit_together(1, lambda rank: Fitting(model, data_of(X, Y), [Anneal(weight)]))
    state = member.fit.state.state_dict()
    assert state["captured"] == [1.0]
    weight.assign(5.0)
    member.fit.state.load_state_dict(state)
    assert float(weight) == 1.0
    del state["captured"]
    with pytest.raises(UserError, match="the state is of another captured"):
        member.fit.state.load_state_dict(state)


class Sums(keras.layers.Layer):
    """Changes something when it is called."""

    def __init__(self):
        super().__init__()
        self.held = {"seen": tf.Variable(0.0, name="seen")}  # where Keras does not look, so that it is no weight

    def call(self, inputs):
        self.held["seen"].assign_add(tf.reduce_sum(inputs))
        return inputs


def test_a_variable_that_the_model_changes_by_itself_is_found_to_differ():
    with pytest.raises(UserError, match=r"captured\.seen") as error:
        fit_together(2, lambda rank: Fitting(dense(Sums()), data_of(X, Y), check_state="epoch"))
    assert "\n" not in str(error.value)


def test_a_layer_that_sets_what_is_trained_is_refused():
    with pytest.raises(UserError, match=r"the model sets .*kernel, which is trained, whenever it is called") as error:
        Fitting(dense(keras.layers.SpectralNormalization(keras.layers.Dense(5))), data_of(X, Y))
    assert "\n" not in str(error.value)


def test_a_variable_that_the_loss_sets_is_refused():
    seen = keras.Variable(0.0, name="seen")

    def loss(labels, outputs):
        seen.assign_add(1.0)
        return tf.square(labels - outputs)

    with pytest.raises(UserError, match="the model or the loss sets seen, which is no weight of the model") as error:
        Fitting(dense(loss=loss), data_of(X, Y))
    assert "\n" not in str(error.value)


class Knows(keras.layers.Layer):
    """Sets a flag when it is called."""

    def build(self, shape):
        self.knows = self.add_weight(shape=(), dtype="bool", initializer=lambda *_, **__: False, trainable=False)

    def call(self, inputs):
        self.knows.assign(keras.ops.ones((), "bool"))
        return inputs


def test_a_flag_that_a_layer_sets_is_refused():
    with pytest.raises(UserError, match="which is no weight of the model that holds numbers: keep it") as error:
        Fitting(dense(Knows()), data_of(X, Y))
    assert "\n" not in str(error.value)


def test_float8_is_refused():
    model = dense()
    model.trainable_variables[0].overwrite_with_gradient = True
    with pytest.raises(UserError, match="computes in float8"):
        Fitting(model, data_of(X, Y))


MSE = keras.losses.MeanSquaredError


def parted():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        ({"loss": MSE(reduction="sum")}, 'fit(): a loss with reduction="sum" or None is a sum'),
        ({"loss": [MSE(reduction="sum")]}, 'fit(): a loss with reduction="sum"'),
        ({"loss": MSE(reduction=None)}, 'fit(): a loss with reduction="sum" or None is a sum'),
        (
            {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)},
            "fit(): Model accumulates gradients by itself",
        ),
        ({"optimizer": parted()}, "fit(): Model accumulates gradients by itself"),
    ],
)
def test_what_can_not_be_divided_is_one_line(compiled, words):
    with pytest.raises(UserError) as error:
        check_compiled(dense(**compiled), "fit()")
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("loss", ["mse", MSE(), MSE(reduction="mean"), lambda labels, outputs: (labels - outputs) ** 2])
def test_means_are_taken(loss):
    check_compiled(dense(loss=loss), "fit()")
