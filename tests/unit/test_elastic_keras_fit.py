"""Keras's ``fit`` on workers: what Keras's own makes of it, they make of it, whoever has which part of a batch; a newcomer goes on with what the others have."""

import random
import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_benches import AT_ONCE, Batches, Fitting, X, Y, dense, fit_together, sequences
from refusal_kit import refused

from elasticdl.elastic.keras.fit import FitCall
from elasticdl.elastic.keras.fit_data import FitData

FEW = slice(0, 16)  # one batch, so that a mean of Keras's over batches is one over samples
LONG, AIMS = sequences()
EACH = np.random.default_rng(1).random(AIMS.shape[:2]).astype("float32")


# -- the numbers --


def plainly(model, x, y=None, callbacks=(), **given):
    """What Keras's own ``fit`` makes of it: the history, and the weights."""
    sizes = {} if y is None else {"batch_size": AT_ONCE}
    history = model.fit(x, y, **sizes, **{"epochs": 3, "shuffle": False, "verbose": 0, **given}, callbacks=[*callbacks])
    return history.history, model.get_weights()


def assert_as_plain(members, plain, rtol=1e-5):
    """Each member has the weights, and the history from the epoch in which it came, that Keras's own ``fit`` gives."""
    history, weights = plain
    for member in members:
        for one, other in zip(member.model.get_weights(), weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)
        for name, values in history.items():
            np.testing.assert_allclose(member.history.history[name], values, rtol=rtol, atol=1e-6, err_msg=name)


def averaging():
    return dense(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))


class Doubled(keras.optimizers.SGD):
    """Has its own word on gradients, where Keras's fit asks it."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2 * gradient, variable) for gradient, variable in grads_and_vars])


def two_headed():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    middle = keras.layers.Dense(4)(inputs)
    heads = {"a": keras.layers.Dense(1, name="a")(middle), "b": keras.layers.Dense(3, name="b")(middle)}
    model = keras.Model(inputs, heads)
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), {"a": "mse", "b": None}, jit_compile=False)
    return model


def masking(loss="mse", regularizer=None):
    """A loss that its mask makes a mean over some of the elements."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Masking(0.0), keras.layers.Dense(1, kernel_regularizer=regularizer)]
    model = keras.Sequential([keras.Input(LONG.shape[1:]), *layers])
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["mae"], jit_compile=False)
    return model


def squares(labels, outputs):
    return tf.reduce_mean(tf.square(labels - outputs), -1)


def with_nothing_left_of_a_part():
    inputs = LONG.copy()
    inputs[11:16] = 0
    return inputs


def measured():
    keras.utils.set_random_seed(1)
    regular = {"kernel_regularizer": "l2", "activity_regularizer": keras.regularizers.L2(0.01)}
    layers = [keras.layers.Dense(5, "relu", **regular), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile("adam", "sparse_categorical_crossentropy", **metrics, jit_compile=False)
    return model


def plateau():
    return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)]


CLASSES = X[:, :3].argmax(1)
WEIGHTED = {"sample_weight": np.linspace(0, 1, len(X)), "validation_split": 0.2}
BY_CLASS = {"class_weight": {0: 2.0, 2: 0.5}, "validation_data": (X, CLASSES[:, None])}
WHOLE, PARTS, WORKERS = (1, AT_ONCE), (1, 5), (2, AT_ONCE)  # how many, and how much at a time
BOTH = {"validation_data": (X[:20], {"a": Y[:20]})}
FITS = {  # model, inputs, labels, data, options, worlds
    "averaged weights": (averaging, X, Y, {"validation_data": (X[:20], Y[:20])}, {}, (WHOLE, PARTS, WORKERS)),
    "apply_gradients": (lambda: dense(optimizer=Doubled(0.02)), X, Y, {}, {}, (WHOLE, PARTS)),
    "head without a loss": (two_headed, X, {"a": Y}, BOTH, {}, (PARTS, WORKERS)),
    "masks": (partial(masking, regularizer="l2"), LONG, AIMS, {}, {}, (WHOLE, PARTS, WORKERS)),
    "masks, a function": (partial(masking, squares), LONG, AIMS, {}, {}, (PARTS,)),
    "masks, nothing left": (masking, with_nothing_left_of_a_part(), AIMS, {}, {}, (PARTS,)),
    "masks and weights": (masking, LONG, AIMS, {"sample_weight": EACH}, {}, (PARTS,)),
    "masks, validated": (masking, LONG, AIMS, {"validation_data": (LONG[FEW], AIMS[FEW])}, {}, (WORKERS,)),
    "weights": (measured, X, CLASSES, WEIGHTED, {"validation_freq": [2]}, ((2, 5),)),
    "classes": (measured, X, CLASSES[:, None], BY_CLASS, {}, ((2, 5),)),
    "steps": (measured, X, CLASSES, {}, {"steps_per_epoch": 3, "epochs": 6, "initial_epoch": 2}, ((2, 5),)),
}


@pytest.mark.parametrize(
    ("name", "workers", "most"), [(name, *world) for name, (*_, worlds) in FITS.items() for world in worlds]
)
def test_a_fit_is_that_of_keras(name, workers, most):
    make, inputs, labels, data, options, _ = FITS[name]
    plain = plainly(make(), inputs, labels, plateau(), **data, **options)
    assert "learning_rate" in plain[0], "there is a plateau"
    members = fit_together(
        workers, lambda rank: Fitting(make(), FitData.of(inputs, labels, **data), plateau(), most=most, **options)
    )
    assert_as_plain(members, plain, rtol=1e-4)


@pytest.mark.parametrize(
    ("frequency", "wanted"),
    [(2, [1, 3]), (np.int64(2), [1, 3]), ([1, 4], [0, 3]), ({2}, [1]), (range(3, 5), [2, 3]), (np.array([2]), [1])],
)
def test_the_epochs_that_are_validated(frequency, wanted):
    given = FitCall(None, [], epochs=2, initial_epoch=0, verbose=0, shuffle=True, validation_freq=frequency)
    assert [epoch for epoch in range(4) if given.validates(epoch)] == wanted


# -- what Keras tells data sets and callbacks --


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_is_told_of_epochs_as_by_keras(workers):
    theirs = Batches()
    plain = plainly(dense(), theirs, validation_data=Batches(), validation_freq=2)
    ours = [(Batches(), Batches()) for _ in range(workers)]
    members = fit_together(
        workers,
        lambda rank: Fitting(
            dense(), FitData.of(ours[rank][0], None, validation_data=ours[rank][1]), validation_freq=2
        ),
    )
    assert_as_plain(members, plain)
    for training, validating in ours:
        assert training.calls == theirs.calls
        assert not validating.calls


class Drawn(Batches):
    """Draws from the generators of its process between epochs."""

    def on_epoch_end(self):
        self.calls.append((random.random(), np.random.random()))


def test_a_worker_that_comes_later_draws_for_its_py_dataset_what_others_have_drawn():
    first, later = Drawn(), Drawn()
    samples = FitData.of(first, None).training
    for count in (1, 3):
        samples.tell(count, seed=5)
    random.random()  # in its process other numbers were drawn
    np.random.random()
    FitData.of(later, None).training.tell(3, seed=5)
    assert first.calls == later.calls
    assert len(set(first.calls)) == 3, "two draws, and between them the beginning of an epoch"


class StopsAt(keras.callbacks.Callback):
    """In the second step of the second epoch."""

    epoch = steps = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, number, logs=None):
        if (self.epoch, number) == (1, 1):
            self.model.stop_training = True

    def on_test_begin(self, logs=None):
        """The last thing before the end of an epoch."""
        self.steps = int(self.model.optimizer.iterations)


def test_training_stops_after_the_step_after_which_kerass_own_stops():
    theirs, ours = StopsAt(), [StopsAt() for _ in range(2)]
    validation = {"validation_data": (X[:20], Y[:20])}
    plain = plainly(dense(), X, Y, [theirs], **validation)
    members = fit_together(2, lambda rank: Fitting(dense(), FitData.of(X, Y, **validation), [ours[rank]]))
    assert [each.steps for each in ours] == [theirs.steps] * 2 == [6, 6]
    assert_as_plain(members, plain)


# -- newcomers: what they take from the others, so that all make the training of one --


class Everything(keras.callbacks.Callback):
    """A plateau rule of its own; and all that such a callback may keep."""

    keeps = ("last", "by", "best", "calm", "note", "summed", "present")

    def __init__(self):
        super().__init__()
        self.last, self.by, self.best = [], {}, None
        self.calm, self.note, self.kept = False, "", np.zeros(2)
        self.lock, self.mean, self.begun = threading.Lock(), keras.metrics.Mean(), (lambda: -1,)

    @property
    def summed(self):
        return self.kept.tolist()

    @property
    def present(self):
        return self.begun[0]()

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = (lambda: epoch,)  # does not travel

    def on_epoch_end(self, epoch, logs=None):
        self.last.append(logs["loss"])
        self.by[epoch % 2] = logs["loss"]
        self.best, self.calm, self.note = min(self.last), epoch > 1, f"epoch {epoch}"
        self.kept = self.kept + logs["loss"]
        if len(self.last) >= 3 and self.last[-3] - self.last[-1] < 100:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5


class Anneals(keras.callbacks.Callback):
    """Sets a variable that the loss closes over. A newcomer's does not: it is sent."""

    def __init__(self, weight, rank):
        super().__init__()
        self.anneal = weight.assign if rank == 0 else lambda value: None

    def on_epoch_begin(self, epoch, logs=None):
        self.anneal(epoch / 2)


def annealed(make, rank):
    weight = make()

    def loss(labels, outputs):
        return tf.square(labels - outputs) + keras.ops.convert_to_tensor(weight) * tf.abs(outputs)

    return Fitting(dense(loss=loss), FitData.of(X, Y), [Anneals(weight, rank)])


class Slowing(keras.optimizers.SGD):
    """Counts in a variable of TensorFlow's."""

    def build(self, variables):
        super().build(variables)
        self.count = tf.Variable(0.0, trainable=False)

    def apply(self, grads, trainable_variables=None):
        self.count.assign_add(1.0)
        super().apply([each / self.count for each in grads], trainable_variables)


def raising(rank):
    """A data set whose samples change from epoch to epoch, and in another order."""
    data = Batches()
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(data, "level", 1 + epoch / 2))
    return Fitting(dense(), FitData.of(data, None), [callback])


def of_a_later_checkpoint(rank):
    """Its script has read the one that the job itself has written since."""
    return Fitting(dense(), FitData.of(Batches(), None), initial_epoch=rank, epochs=3 - rank, steps_per_epoch=3)


NEWCOMERS = {
    "callbacks that decide": (lambda rank: Fitting(dense(), FitData.of(X, Y), [Everything()], epochs=6), 17),
    "a variable of TensorFlow's": (partial(annealed, lambda: tf.Variable(0.0)), 10),
    "an optimizer's own": (lambda rank: Fitting(dense(optimizer=Slowing(0.02)), FitData.of(X, Y)), 5),
    "a data set": (raising, 6),
    "epochs": (of_a_later_checkpoint, 5),
}


@pytest.mark.parametrize("name", NEWCOMERS)
def test_a_newcomer_goes_on_as_the_others_do(name):
    make, joins_after = NEWCOMERS[name]
    (alone,) = fit_together(1, make)
    first, newcomer = fit_together(1, make, {(0, joins_after): "joined"})
    for member in (first, newcomer):
        assert member.fit.state.step == alone.fit.state.step
        assert float(member.model.optimizer.learning_rate) == float(alone.model.optimizer.learning_rate)
        for one, other in zip(member.model.get_weights(), alone.model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(first.model.get_weights(), newcomer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for theirs, mine in zip(first.callbacks, newcomer.callbacks, strict=True):
        for kept in getattr(theirs, "keeps", ()):
            assert getattr(mine, kept) == getattr(theirs, kept)


def test_captured_variables_are_in_a_checkpoint():
    (member,) = fit_together(1, partial(annealed, lambda: tf.Variable(0.0)))
    state = member.fit.state.state_dict()
    assert state.pop("captured") == [1.0]
    refused("the state is of another captured", partial(member.fit.state.load_state_dict, state))
