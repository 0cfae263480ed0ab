"""What an optimizer inside ``fit`` cannot know: where an epoch ends, and how large each micro-batch is."""

from __future__ import annotations

from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.ga.keras.optimizers import Optimizer
from elasticdl.tensorflow import keras


class ExactEpochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Each epoch of ``fit`` gives what big batches of ``steps`` times ``batch_size`` samples would have given.

    The remainder of an epoch is stepped at its end, before validation, and not carried into the next. Micro-batches
    weigh as many samples as they have, also in ``train_on_batch``, from now on. Give it before callbacks that save.
    """

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._in_epoch = False
        accumulating(model.optimizer).flush()  # of an earlier fit(), whose micro-batches may have had other weights
        _weigh(model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._in_epoch:
            accumulating(self.model.optimizer).flush()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        accumulating(self.model.optimizer).flush()


def accumulating(optimizer: Any) -> Optimizer:
    """The accumulating optimizer that a compiled model has, where Keras has put a LossScaleOptimizer around it.

    Raises:
        UserError: it has none.
    """
    optimizer = _without_scaling(optimizer)
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise UserError(f"compile the model with an optimizer of elasticdl.ga.keras.optimizers, not with a {kind}")
    return optimizer


def _without_scaling(optimizer: Any) -> Any:
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def _weigh(model: keras.Model) -> None:
    """Have the model tell its optimizer the size of each batch: the optimizer is given nothing but gradients."""
    step = model.train_step
    if getattr(step, "weighs", False):
        return

    def train_step(data: Any) -> Any:
        optimizer = _without_scaling(model.optimizer)
        if not isinstance(optimizer, Optimizer):  # the model was compiled anew
            return step(data)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        leaf = next(leaf for leaf in keras.tree.flatten(inputs) if leaf is not None)
        with optimizer.weighing(keras.ops.shape(leaf)[0]):
            return step(data)

    train_step.weighs = True  # type: ignore[attr-defined]
    model.train_step = train_step
    model.make_train_function(force=True)
