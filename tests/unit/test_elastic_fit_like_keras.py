"""What Keras's ``fit`` does around its steps, an elastic one does too, however many workers make them."""

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

X, Y = numbers()


def averaging():
    return dense(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))


@pytest.mark.parametrize(("workers", "most"), [(1, BATCH), (1, 5), (2, BATCH)])
def test_averaged_weights_are_those_of_the_model_at_the_end(workers, most):
    plain = plainly(averaging(), X, Y)
    members = fit_together(workers, lambda rank: Fitting(averaging(), data_of(X, Y), most=most))
    assert_as_plain(members, plain)


def test_without_epochs_weights_stay():
    model = averaging()
    before = model.get_weights()
    (member,) = fit_together(1, lambda rank: Fitting(model, data_of(X, Y), epochs=0))
    np.testing.assert_array_equal(np.concatenate([each.ravel() for each in member.weights()]), np.concatenate([each.ravel() for each in before]))
