"""A loss that a mask makes a mean over some of the elements is that mean over the whole batch, whoever has which part of it; a metric that
is no sum over batches is refused."""

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import pytest
import tensorflow as tf
from elastic_fit_kit import BATCH, Fitting, assert_as_plain, data_of, dense, fit_together, numbers, plainly
from elastic_keras_kit import Board, Trainee, run_all

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.keras.fit import FitStep

DATA = numbers()


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest_error")
        self.kept = self.add_variable(shape=(), initializer="zeros", name="kept")

    def update_state(self, labels, outputs, sample_weight=None):
        self.kept.assign(keras.ops.maximum(self.kept, keras.ops.max(keras.ops.abs(labels - outputs))))

    def result(self):
        return self.kept


def test_a_metric_that_keeps_no_sum_is_refused():
    with pytest.raises(UserError, match=r"the metric largest_error \(Largest\) can't be put together") as error:
        Fitting(dense(metrics=["mae", Largest()]), data_of(*DATA))
    assert "\n" not in str(error.value)


STEPS = 5


def sequences(samples=48, seed=0):
    """Of unequal lengths, the long ones first; what comes after is 0, and masked."""
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(samples, STEPS, 2)).astype("float32")
    lengths = np.sort(generator.integers(1, STEPS + 1, samples).reshape(-1, BATCH), 1)[:, ::-1].ravel()
    inputs[np.arange(STEPS)[None] >= lengths[:, None]] = 0
    return inputs, generator.normal(size=(samples, STEPS, 1)).astype("float32")


X, Y = sequences()


def masking(loss="mse", *, outputs=1, regularizer=None, activity=None, optimizer=None):
    keras.utils.set_random_seed(1)
    first = keras.Input((STEPS, 2))
    masked = keras.layers.Masking(0.0)(first)
    made = [
        keras.layers.Dense(1, kernel_regularizer=regularizer, activity_regularizer=activity)(masked)
        for _ in range(outputs)
    ]
    model = keras.Model(first, made if outputs > 1 else made[0])
    model.compile(
        optimizer or keras.optimizers.SGD(0.5), loss, metrics=["mae"] if outputs == 1 else None, jit_compile=False
    )
    return model


def squares(labels, outputs):
    return tf.reduce_mean(tf.square(labels - outputs), -1)


class OwnLoss(keras.losses.Loss):
    def call(self, labels, outputs):
        return squares(labels, outputs)


def with_nothing_left_of_a_part():
    inputs = X.copy()
    inputs[11:16] = 0
    return inputs


@pytest.mark.parametrize(
    ("workers", "most", "loss", "inputs"),
    [
        (1, BATCH, "mse", X),
        (1, 5, "mse", X),
        (2, BATCH, "mse", X),
        (1, 5, squares, X),
        (1, 5, OwnLoss(), X),
        (1, 5, "mse", with_nothing_left_of_a_part()),
    ],
    ids=["whole", "parts", "workers", "function", "own class", "nothing left"],
)
def test_the_mean_is_over_what_is_left_of_the_whole_batch(workers, most, loss, inputs):
    plain = plainly(masking(loss, regularizer="l2"), inputs, Y)
    members = fit_together(
        workers, lambda rank: Fitting(masking(loss, regularizer="l2"), data_of(inputs, Y), most=most)
    )
    assert_as_plain(members, plain, rtol=1e-4)


def test_a_validation_is_a_mean_over_what_is_left_of_it():
    few = slice(0, 16)  # one batch, so that Keras's is that, too
    given = {"validation_data": (X[few], Y[few]), "epochs": 1}
    plain = plainly(masking(), X, Y, **given)
    for workers, most in ((1, 3), (2, BATCH)):
        members = fit_together(
            workers,
            lambda rank, most=most: Fitting(
                masking(), data_of(X, Y, validation_data=(X[few], Y[few])), most=most, epochs=1
            ),
        )
        assert_as_plain(members, plain, rtol=1e-4)


def test_weights_count_as_they_do_in_one_batch():
    weights = np.random.default_rng(1).random((len(X), STEPS)).astype("float32")
    plain = plainly(masking(), X, Y, sample_weight=weights)
    members = fit_together(1, lambda rank: Fitting(masking(), data_of(X, Y, sample_weight=weights), most=5))
    assert_as_plain(members, plain, rtol=1e-4)


def step_of(model, targets=Y):
    return FitStep(
        model, tf.constant(X[:2]), keras.tree.map_structure(lambda each: tf.constant(each[:2]), targets), weighted=False
    )


def test_different_masks_are_refused():
    first = keras.Input((STEPS, 2))
    outputs = [keras.layers.Masking(number)(first) for number in (0.0, 1.0)]
    model = keras.Model(first, [keras.layers.Dense(1)(each) for each in outputs])
    model.compile("sgd", "mse", jit_compile=False)
    step, targets = step_of(model, [Y, Y]), [tf.constant(Y[:2])] * 2
    with pytest.raises(UserError, match="its outputs have different masks") as error:
        step.warm_up(tf.constant(X[:2]), targets)
    assert "\n" not in str(error.value)


def test_losses_of_outputs_beside_a_mask_are_refused():
    step = step_of(masking(activity="l2"))
    with pytest.raises(UserError, match="but not of what add_loss or a regularizer of outputs adds"):
        step.warm_up(tf.constant(X[:2]), tf.constant(Y[:2]))


class Sequences:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(("loss", "masked"), [(keras.losses.MeanSquaredError(), True), (squares, False)])
def test_a_loop_of_ones_own_weighs_by_what_its_loss_looks_at(loss, masked, monkeypatch):
    monkeypatch.setattr("elastic_keras_kit.loss", loss)

    def train(workers, most):
        board, policy = Board(workers), BatchPolicy(BATCH, None, most)
        members = [
            Trainee(rank, board, policy, masking(), keras.optimizers.SGD(0.5), Sequences()) for rank in range(workers)
        ]
        run_all(members, lambda member: member.train(1))
        return members

    (alone,) = train(1, BATCH)
    for member in (*train(1, 5), *train(2, BATCH)):
        np.testing.assert_allclose(member.losses, alone.losses, rtol=1e-4)
        assert member.train_step._masked == masked
