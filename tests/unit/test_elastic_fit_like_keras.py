"""What Keras's ``fit`` does around its steps, an elastic one does too, however many workers make them."""

import random

import keras
import numpy as np
import pytest
from elastic_fit_kit import (
    BATCH,
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

X, Y = numbers()


def averaging():
    return dense(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))


class Batches(keras.utils.PyDataset):
    """Draws a new order between epochs; what reading leaves behind is of its process."""

    def __init__(self, draws=False, grows_in=None):
        """``draws``: where it is read, too."""
        super().__init__()
        self.random, self.draws, self.grows_in = np.random.default_rng(3), draws, grows_in
        self.order, self.level, self.calls = np.arange(len(X)), 1.0, []
        self.opened, self.read = -1, {}

    def __len__(self):
        return len(X) // BATCH + (len(self.calls) == self.grows_in)

    def __getitem__(self, number):
        self.opened = number
        self.read[number] = True
        if self.draws:
            self.random.random()
        rows = self.order[number * BATCH : (number + 1) * BATCH]
        return X[rows] * np.float32(self.level), Y[rows]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.random.shuffle(self.order)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_is_told_of_epochs_as_by_keras(workers):
    theirs = Batches()
    plain = plainly(dense(), theirs, validation_data=Batches(), validation_freq=2)
    ours = [(Batches(), Batches()) for _ in range(workers)]
    members = fit_together(
        workers,
        lambda rank: Fitting(dense(), data_of(ours[rank][0], validation_data=ours[rank][1]), validation_freq=2),
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
    samples = data_of(first).training
    for count in (1, 3):
        samples.tell(count, seed=5)
    random.random()  # in its process other numbers were drawn
    np.random.random()
    data_of(later).training.tell(3, seed=5)
    assert first.calls == later.calls
    assert len(set(first.calls)) == 3, "two draws, and between them the beginning of an epoch"


def test_a_py_dataset_that_grows_is_refused():
    samples = data_of(Batches(grows_in=3)).training
    with pytest.raises(UserError, match=r"the Batches has 5 batches after on_epoch_end\(\), and had 4") as error:
        samples.tell(3, 0)
    assert "\n" not in str(error.value)


class StopsAt(keras.callbacks.Callback):
    """At the hook of this name, the second time that it is called in the second epoch."""

    def __init__(self, hook):
        super().__init__()
        self.epoch, self.called, self.steps = -1, 0, 0
        setattr(self, hook, self.count)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def count(self, number, logs=None):
        self.called += self.epoch == 1
        if self.called == 2:
            self.model.stop_training = True

    def on_test_begin(self, logs=None):
        """The last thing before the end of an epoch."""
        self.steps = int(self.model.optimizer.iterations)


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
def test_training_stops_after_the_step_after_which_kerass_own_stops(hook):
    theirs, ours = StopsAt(hook), [StopsAt(hook) for _ in range(2)]
    validation = {"validation_data": (X[:20], Y[:20])}
    plain = plainly(dense(), X, Y, [theirs], **validation)
    members = fit_together(2, lambda rank: Fitting(dense(), data_of(X, Y, **validation), [ours[rank]]))
    assert [each.steps for each in ours] == [theirs.steps] * 2 == [6, 6]
    assert_as_plain(members, plain)


class OlderName(keras.callbacks.Callback):
    def __init__(self, seen):
        super().__init__()
        self.show = seen.append

    def on_batch_end(self, batch, logs=None):
        self.show(dict(logs))


@pytest.mark.parametrize(
    "make",
    [
        lambda seen: keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs))),
        OlderName,
    ],
    ids=["lambda", "on_batch_end"],
)
def test_every_callback_that_looks_at_steps_sees_the_metrics(make):
    theirs, ours = [], []
    plainly(dense(metrics=["mae"]), X, Y, [make(theirs)], epochs=1)
    fit_together(1, lambda rank: Fitting(dense(metrics=["mae"]), data_of(X, Y), [make(ours)], epochs=1))
    assert len(ours) == len(theirs) == len(X) // BATCH
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


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


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (averaging, Y),
        (lambda: dense(optimizer=Doubled(0.02)), Y),
        (two_headed, {"a": Y}),
    ],
    ids=["averaged weights", "apply_gradients", "head without a loss"],
)
@pytest.mark.parametrize(("workers", "most"), [(1, BATCH), (1, 5), (2, BATCH)], ids=["whole", "parts", "workers"])
def test_a_fit_is_that_of_keras(make, workers, most, labels):
    validation = {"validation_data": (X[:20], keras.tree.map_structure(lambda each: each[:20], labels))}
    plain = plainly(make(), X, labels, **validation)
    members = fit_together(workers, lambda rank: Fitting(make(), data_of(X, labels, **validation), most=most))
    assert_as_plain(members, plain, rtol=1e-4)


def raising(data):
    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(data, "level", 1 + epoch / 2))


def test_a_newcomer_s_data_set_is_as_those_of_the_others():
    data = [Batches(), Batches()]
    members = fit_with_a_newcomer(
        lambda rank: Fitting(dense(), data_of(data[rank]), [raising(data[rank])], epochs=4), joins_after=6
    )
    np.testing.assert_array_equal(data[0].order, data[1].order)
    assert data[0].level == data[1].level == 2.5
    for one, other in zip(*(member.weights() for member in members), strict=True):
        np.testing.assert_array_equal(one, other)


def test_orders_that_differ_are_found_in_the_epoch_that_has_them():
    """A generator is drawn from where samples are read, and so differs between workers."""
    data = [Batches(draws=True), Batches(draws=True)]
    data[1].random.random(5)
    with pytest.raises(UserError, match=r"in its training data sample .* \(held.order\)") as error:
        fit_together(2, lambda rank: Fitting(dense(), data_of(data[rank])))
    assert "\n" not in str(error.value)


def test_a_newcomer_takes_the_job_s_epochs():
    """Its script has read the checkpoint that the job itself has written since."""
    data = [Batches(), Batches()]

    def make(rank):
        later = {"initial_epoch": rank, "epochs": 4 - rank, "steps_per_epoch": 3}
        return Fitting(dense(), data_of(data[rank]), **later)

    steps = {"epochs": 4, "steps_per_epoch": 3}
    (alone,) = fit_together(1, lambda rank: Fitting(dense(), data_of(Batches()), **steps))
    members = fit_with_a_newcomer(make, joins_after=5)
    np.testing.assert_array_equal(data[0].order, data[1].order)
    for member in members:
        assert member.fit.state.step == alone.fit.state.step
        for one, other in zip(member.weights(), alone.weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
