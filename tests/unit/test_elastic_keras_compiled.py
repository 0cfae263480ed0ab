"""A model that was compiled or loaded before it is given to `Model` is looked at as one that is compiled by it."""

import elasticdl.elastic.keras.backend  # noqa: F401 - before Keras  # isort: skip
import keras
import pytest
from elastic_fit_kit import dense

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.fit_arguments import check_compiled, warn_of_eagerness

MSE = keras.losses.MeanSquaredError


def parted():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        ({"loss": MSE(reduction="sum")}, 'fit(): a loss with reduction="sum" depends on the batch'),
        ({"loss": [MSE(reduction="sum")]}, 'fit(): a loss with reduction="sum"'),
        ({"loss": MSE(reduction=None)}, "fit(): a loss with reduction=None gives one value for each sample"),
        ({"loss": MSE(reduction="none")}, "fit(): a loss with reduction=None"),
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


def test_a_model_that_was_loaded_is_looked_at(tmp_path):
    dense(loss=MSE(reduction="sum")).save(tmp_path / "model.keras")
    with pytest.raises(UserError, match="depends on the batch"):
        check_compiled(keras.models.load_model(tmp_path / "model.keras"), "fit()")


@pytest.mark.parametrize("loss", ["mse", MSE(), MSE(reduction="mean"), lambda labels, outputs: (labels - outputs) ** 2])
def test_means_are_taken(loss):
    check_compiled(dense(loss=loss), "fit()")


def test_eager_execution_is_not_ignored_in_silence(caplog):
    model = dense()
    warn_of_eagerness(model)
    assert not caplog.records
    model.run_eagerly = True
    warn_of_eagerness(model)
    (record,) = caplog.records
    assert "run_eagerly" in record.getMessage()
