"""Callbacks that hold others, and callbacks that keep something outside of themselves."""

import keras
import pytest
from elastic_fit_kit import Fitting, data_of, dense, fit_with_a_newcomer, numbers

X, Y = numbers()


class After(keras.callbacks.Callback):
    """Asks another one, or several."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = list(inner)

    def set_model(self, model):
        super().set_model(model)
        for each in self.inner:
            each.set_model(model)

    def on_train_begin(self, logs=None):
        for each in self.inner:
            each.on_train_begin(logs)

    def on_epoch_end(self, epoch, logs=None):
        for each in self.inner:
            each.on_epoch_end(epoch, logs)


def test_what_an_inner_callback_keeps_goes_to_a_newcomer():
    stop = [keras.callbacks.EarlyStopping("loss", patience=50, min_delta=100.0) for _ in range(2)]
    rate = [keras.callbacks.ReduceLROnPlateau("loss", patience=50, min_delta=100.0) for _ in range(2)]
    members = fit_with_a_newcomer(
        lambda rank: Fitting(dense(), data_of(X, Y), [After(stop[rank], rate[rank])], epochs=4), joins_after=6
    )
    assert (stop[1].wait, stop[1].best, stop[1].min_delta) == (stop[0].wait, stop[0].best, -100.0)
    assert (rate[1].wait, rate[1].best) == (rate[0].wait, rate[0].best)
    assert stop[0].wait == 3
    assert stop[1].model is members[1].model


class Counted(keras.callbacks.Callback):
    epochs = 0
    names = ("a", "b")

    def on_epoch_end(self, epoch, logs=None):
        Counted.epochs += 1


best = [float("inf")]
calm = [1]


def of_the_script(epoch, logs):
    best[0] = min(best[0], logs["loss"] - len(calm))


def of_a_closure():
    waited = 0

    def end(epoch, logs):
        nonlocal waited
        waited += 1

    return end


class Judge:
    def __init__(self):
        self.seen = 0

    def look(self, epoch, logs):
        self.seen += 1


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (Counted, "Counted.epochs, an attribute of its class"),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=of_the_script), "best, a variable of the script"),
        (
            lambda: keras.callbacks.LambdaCallback(on_epoch_end=of_a_closure()),
            "waited, a variable of the function around",
        ),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=Judge().look), "seen of the Judge whose look() it calls"),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=print), ""),
        (lambda: keras.callbacks.EarlyStopping("loss"), ""),
    ],
    ids=["class", "global", "closure", "method", "nothing", "keras"],
)
def test_what_a_callback_keeps_outside_is_named_once(make, title):
    fitting = Fitting(dense(), data_of(X, Y), [make()])
    told = []
    fitting.context.warn = told.append
    callbacks = fitting.fit.driver
    callbacks.enter(fitting.collective.world)
    callbacks.pack()
    assert not told
    for epoch in range(2):
        callbacks.on_epoch_end(epoch, {"loss": 2.0})
        callbacks.pack()
    assert [line.partition(" has changed ")[2].startswith(title) for line in told] == ([True] if title else [])
