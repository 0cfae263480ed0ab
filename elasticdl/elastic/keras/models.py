"""``Model(model)``: ``compile`` and ``fit`` as ever, on workers that may come and go.

import elasticdl.elastic.keras

elasticdl.elastic.keras.init(256, 64)
model = elasticdl.elastic.keras.models.Model(model)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, epochs=10)
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import StageSuperseded
from elasticdl.elastic.keras.fit import Fit, FitCall
from elasticdl.elastic.keras.fit_data import FitData, check_compiled, has_loss
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.keras.loader import own
from elasticdl.elastic.training.batch_shape import job
from elasticdl.elastic.training.runtime import kept_streams
from elasticdl.tensorflow import keras

log = logging.getLogger(__name__)

stages = Stages()  # of the script


class Model:
    """A built Keras model, ``self.model``, whose ``fit`` is elastic; all other attributes are the model's own (docs/runai.md)."""

    model: keras.Model

    def __init__(self, model: keras.Model) -> None:
        """Wrap a model.

        Raises:
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
        if not context.under_master and (gpus := job.use_one_gpu()) > 1:
            log.warning("alone, one of %d GPUs is used: start it by `elasticdl run --num_workers %d`", gpus, gpus)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Keras's, ``jit_compile`` included; ``run_eagerly`` and ``steps_per_execution`` have no effect.

        Raises:
            UserError: the optimizer accumulates gradients already, or a loss is no mean.
        """
        self.model.compile(*args, **kwargs)
        check_compiled(self.model, "compile()")

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
        validation_freq: int | Container[int] = 1,
        validation_batch_size: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        steps_per_epoch: int | None = None,
        **others: Any,
    ) -> keras.callbacks.History:
        """As Keras's, on global batches of ``elasticdl.elastic.global_batch_size``, on each sample once per epoch.

        Logs are over all workers. Callbacks that write (ModelCheckpoint, CSVLogger, TensorBoard) run on rank 0 only, others on
        all. Arguments that are not named here are Keras's.

        Args:
            x: inputs, arrays, nested as the model takes them; a ``PyDataset`` (in its own order); or an object with ``__len__``
                and ``__getitem__``.
            y: labels, one row a sample, if ``x`` does not bring them.
            batch_size: not looked at: the batch sizes are those of `init`.
            steps_per_epoch: optimizer steps of an epoch. As with Keras, it ends early where all samples were trained on, and
                the next goes on where it has ended.

        Raises:
            UserError: the data or the arguments can't be used here.
        """
        if not self.model.compiled or self.model.optimizer is None or self.model.loss is None:
            raise UserError("fit(): call compile() with an optimizer and a loss first")
        check_compiled(self.model, "fit()")
        if self.model.run_eagerly:
            log.warning(
                "compile(run_eagerly=True) is not looked at: model and loss run when they are traced, and not in each step"
            )
        for name in (each for each in others if others[each] is not None):
            raise UserError(f"fit({name}=) is not supported: leave it out; validation is on all of validation_data")
        if batch_size not in (None, job.numbers.batch_size, job.numbers.global_batch_size):
            log.warning("fit(batch_size=%s) is not looked at: the batch sizes are those given to init", batch_size)
        data = FitData.of(x, y, sample_weight, class_weight, validation_data, validation_split)
        if data.validation is not None and type(self.model).test_step is not keras.Model.test_step:
            raise UserError(
                f"fit(validation_data=): {type(self.model).__name__} has a test_step() of its own, which can't be divided among workers: "
                "call evaluate() in a callback's on_epoch_end, or after fit()"
            )
        if data.training.weighted and has_loss(self.model, "mean_with_sample_weight"):
            raise UserError(
                'fit(): with weights, a loss with reduction="mean_with_sample_weight" depends on the micro-batch; use '
                '"sum_over_batch_size"'
            )
        shown = (2 if job.under_master else 1) if verbose == "auto" else int(verbose)
        given = [each for each in keras.tree.flatten(callbacks) if each is not None]
        history = next((each for each in given if isinstance(each, keras.callbacks.History)), None)
        if history is None:
            given.append(history := keras.callbacks.History())
        if shown:
            given.insert(0, keras.callbacks.ProgbarLogger())
        with kept_streams():  # what a script draws after fit does not depend on what this worker has loaded
            self._train(
                history,
                FitCall(
                    data,
                    given,
                    epochs=epochs,
                    initial_epoch=initial_epoch,
                    verbose=shown,
                    shuffle=bool(shuffle) and data.training.batches is None,
                    validation_freq=validation_freq,
                    steps_per_epoch=steps_per_epoch,
                ),
            )
        return history

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # while being copied or unpickled
            raise AttributeError("Model has no model yet")
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    def _train(self, history: keras.callbacks.History, call: FitCall) -> None:
        if stages.overtaken:
            self._repeat(history, call)
            return
        fit = Fit(own.context(), stages, self.model, call)
        try:
            with closing(fit.state.loader):
                own.train_stage(fit.train, fit.state, fit)
        except StageSuperseded as overtaken:
            log.info("%s", overtaken)
            if stages.overtaken:
                self._repeat(history, call)
                return
        stages.end(history, call.data.training.told, fit.state.progress)

    def _repeat(self, history: keras.callbacks.History, call: FitCall) -> None:
        """The others have ended this call of ``fit``: leave behind what it left behind there."""
        call.data.training.tell(stages.repeat(history), own.context().seed)
        history.set_model(self.model)
