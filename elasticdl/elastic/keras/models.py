"""``Model(model)``: ``compile``, ``fit``, ``evaluate`` and ``predict`` as ever, on workers that may come and go.

import elasticdl.elastic.keras

elasticdl.elastic.keras.init(256, 64)
model = elasticdl.elastic.keras.models.Model(model)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, epochs=10)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.elastic.current import job
from elasticdl.elastic.keras.fit import Fit, FitOptions
from elasticdl.elastic.keras.fit_data import Batches, Columns, open_data
from elasticdl.elastic.keras.job import own
from elasticdl.elastic.session import Alone

log = logging.getLogger(__name__)

KERAS_BATCH = 32  # of evaluate() and predict(), unless they are told


class Model:
    """A built Keras model, which is ``self.model``; what is not mentioned here is the model's own."""

    model: keras.Model

    def __init__(self, model: keras.Model) -> None:
        """Raises:
        UserError: `init` has not been called, or the model is not built or trains by a way of its own.
        """
        context = own.context()
        if not isinstance(model, keras.Model):
            raise UserError(f"Model(model): the model is a {type(model).__name__}; expected a keras.Model")
        if not model.built:
            raise UserError(
                f"Model(model): {model.name} is not built, so it has no weights yet: give it a keras.Input, or call it once"
            )
        for name in ("train_step", "compute_loss", "compute_metrics"):
            if getattr(type(model), name) is not getattr(keras.Model, name):
                raise UserError(
                    f"Model(model): {type(model).__name__} has a {name}() of its own; use elastic.keras.run"
                )
        object.__setattr__(self, "model", model)
        if isinstance(context.membership, Alone) and (gpus := job.use_one_gpu()) > 1:
            log.warning("alone, one of %d GPUs is used: start it by `elasticdl run --num_workers %d`", gpus, gpus)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Keras's; how the functions run (``run_eagerly``, ``steps_per_execution``) is not looked at.

        Raises:
            UserError: the optimizer accumulates gradients already.
        """
        self.model.compile(*args, **kwargs)
        optimizer = self.model.optimizer
        if getattr(optimizer, "gradient_accumulation_steps", None) or hasattr(optimizer, "accumulated"):
            raise UserError(
                "compile(): Model accumulates gradients by itself; give it the optimizer without accumulation"
            )
        if any(getattr(loss, "reduction", None) == "sum" for loss in keras.tree.flatten(self.model.loss)):
            raise UserError('compile(): a loss with reduction="sum" depends on the batch; use "sum_over_batch_size"')

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        initial_epoch: int = 0,
        validation_freq: int = 1,
        validation_batch_size: int | None = None,
        **others: Any,
    ) -> keras.callbacks.History:
        """As Keras's, on global batches of ``elasticdl.elastic.global_batch_size``, on each sample once per epoch.

        ``x`` and ``y``: arrays, nested as the model takes them, a ``PyDataset`` (in its own order), or an object with
        ``__len__`` and ``__getitem__``. The batch sizes are those of `init`, whatever is given here. Logs are over all
        workers. Callbacks that write (ModelCheckpoint, CSVLogger, TensorBoard) run on rank 0 only, others on all.

        Raises:
            UserError: the data or the arguments can't be used here.
        """
        if not self.model.compiled or self.model.optimizer is None or self.model._compile_loss is None:
            raise UserError("fit(): call compile() with an optimizer and a loss first")
        if unsupported := [name for name, value in others.items() if value is not None]:
            raise UserError(f"fit({', '.join(unsupported)}=): not supported in elastic training; leave it out")
        if batch_size not in (None, job.numbers.batch_size, job.numbers.global_batch_size):
            log.warning("fit(batch_size=%s) is not looked at: the batch sizes are those given to init", batch_size)
        context = own.context()
        alone = isinstance(context.membership, Alone)
        if own.trained and not alone:
            raise UserError("fit() was called before: under `elasticdl run`, train in one call, with more epochs")
        training, validation = open_data(x, y), None
        if validation_data is not None:
            pair = validation_data if isinstance(validation_data, tuple | list) else (validation_data, None)
            if len(pair) != 2:
                raise UserError("fit(validation_data=): expected a pair (x, y), or a data set; without sample weights")
            validation = open_data(pair[0], pair[1], "fit(validation_data=)")
        elif validation_split:
            if not isinstance(training, Columns):
                raise UserError("fit(validation_split=) needs arrays; give validation_data")
            training, validation = training.split(validation_split)
        options = FitOptions(
            epochs=epochs,
            initial_epoch=initial_epoch,
            verbose=_verbosity(verbose, alone=alone),
            shuffle=bool(shuffle) and not isinstance(training, Batches),
            validation_freq=validation_freq,
        )
        history, given = _complete(callbacks, options.verbose)
        fit = Fit(context, self.model, (training, validation), given, options)
        own.train(fit.train, fit.state, fit.hooks)
        return history

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: int | None = None, verbose: int | str = "auto", **others: Any
    ) -> Any:
        """As Keras's; each worker that calls it runs all of it, in batches that fit its memory."""
        return self.model.evaluate(x, y, self._batch_size(x, batch_size), self._shown(verbose), **others)

    def predict(self, x: Any, batch_size: int | None = None, verbose: int | str = "auto", **others: Any) -> Any:
        """As Keras's; each worker that calls it runs all of it, in batches that fit its memory."""
        return self.model.predict(x, self._batch_size(x, batch_size), self._shown(verbose), **others)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # while being copied or unpickled
            raise AttributeError("Model has no model yet")
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    @staticmethod
    def _batch_size(x: Any, given: int | None) -> int | None:
        arrays = all(hasattr(leaf, "shape") for leaf in keras.tree.flatten(x))
        bound = own.context().policy.max_micro_batch or KERAS_BATCH
        return min(bound, KERAS_BATCH) if given is None and arrays else given

    @staticmethod
    def _shown(verbose: int | str) -> int | str:
        return verbose if own.context().rank == 0 else 0


def _verbosity(verbose: int | str, *, alone: bool) -> int:
    if verbose == "auto":
        return 1 if alone else 2  # a line for each epoch in a log
    if verbose not in (0, 1, 2):
        raise ArgumentError(f'fit(verbose={verbose!r}): must be "auto", 0, 1 or 2')
    return int(verbose)


def _complete(callbacks: Any, verbose: int) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The history, and all callbacks with it and what shows progress, in Keras's order."""
    given = [each for each in keras.tree.flatten(callbacks) if each is not None]
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"fit(callbacks=): {type(callback).__name__} is not a keras.callbacks.Callback")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UserError("fit(callbacks=): BackupAndRestore is not supported; use ModelCheckpoint")
    histories = [each for each in given if isinstance(each, keras.callbacks.History)]
    history = histories[0] if histories else keras.callbacks.History()
    progress = [keras.callbacks.ProgbarLogger()] if verbose else []
    return history, [*progress, *given, *([] if histories else [history])]
