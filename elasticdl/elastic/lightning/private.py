"""What of Lightning has no public name: all that this package takes of it. Run with Lightning 2.5.0 and 2.6.6."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

# Barriers, by which Lightning says how far it is.
RESTORED, READY, SAVED = "_CheckpointConnector.resume_end", "run-stage", "Trainer.save_checkpoint"
LOADER_ASKED, TRAIN_LOADER_ASKED = "_dataloader()", "train_dataloader()"
# Attributes of a ModelCheckpoint that are in no state of its own: by these it knows whether it has saved a step already.
OF_SAVED = ("_last_global_step", "_last_checkpoint", "_defer_save")
Accumulators = tuple[Any, Any]  # of a key over an epoch: of values, and of the samples that they stand for
PLAIN = (bool, int, float, str)


def devices_and_nodes(trainer: Any) -> tuple[int, int]:
    """That a trainer was told to train on."""
    connector = trainer._accelerator_connector
    return len(connector._parallel_devices), connector._num_nodes_flag


def syncs_batch_norm(trainer: Any) -> bool:
    return trainer._accelerator_connector._layer_sync is not None


def validates_by_the_clock(trainer: Any) -> bool:
    return getattr(trainer, "_val_check_time_interval", None) is not None


# -- a step --


def results_of(trainer: Any) -> Any:
    """What was logged in the training loop, by key."""
    return trainer.fit_loop.epoch_loop._results


def accumulators_of(metric: Any) -> Accumulators:
    """By reference, as Lightning makes new tensors of them."""
    return metric.value, getattr(metric, "cumulated_batch_size", None)


def put_accumulators(metric: Any, accumulators: Accumulators) -> None:
    metric.value, size = accumulators
    if size is not None:
        metric.cumulated_batch_size = size
    metric._computed, metric.has_reset = None, False


def arguments_of_step(trainer: Any, batch: Any, index: int) -> tuple[Any, ...]:
    """Of ``training_step``."""
    return tuple(trainer.fit_loop.epoch_loop._build_kwargs({}, batch, index).values())


@contextlib.contextmanager
def moved(trainer: Any, batch: Any) -> Iterator[Any]:
    """``batch``, on the device of training, by the hooks of batches. Within, what is logged is of this batch."""
    results = results_of(trainer)
    before = results.batch, results.batch_size
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    results.batch, results.batch_size = trainer.strategy.batch_to_device(batch, dataloader_idx=0), None
    try:
        yield results.batch
    finally:
        results.batch, results.batch_size = before


def is_in_training_step(module: Any) -> bool:
    return bool(module._current_fx_name == "training_step")


@contextlib.contextmanager
def in_training_step(module: Any) -> Iterator[None]:
    """Within, ``self.log`` is called by ``training_step``, as far as Lightning can tell."""
    before, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before


# -- where a trainer stands --


def metrics_of(trainer: Any) -> tuple[dict[str, Any], ...]:
    connector = trainer._logger_connector
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


def logging_place(trainer: Any) -> tuple[Any, Any]:
    """In which hook, and whether in the first iteration."""
    connector = trainer._logger_connector
    return connector._current_fx, connector._first_loop_iter


def set_logging_place(trainer: Any, place: tuple[Any, Any]) -> None:
    connector = trainer._logger_connector
    connector._current_fx, connector._first_loop_iter = place


def loops_of(loop: Any) -> list[Any]:
    """This loop and those within it."""
    inner = [each for each in vars(loop).values() if hasattr(each, "restarting") and hasattr(each, "on_iteration_done")]
    return [loop, *(each for one in inner for each in loops_of(one))]


def counts_of(loops: list[Any]) -> list[Any]:
    """The objects within the loops that hold nothing but counts, and those that hold these."""
    found = [value for loop in loops for value in vars(loop).values() if hasattr(value, "reset_on_run")]
    for each in found:  # which grows meanwhile
        found += [value for value in vars(each).values() if hasattr(value, "__dict__")]
    return [each for each in found if any(type(value) in PLAIN for value in vars(each).values())]


def resume_within_epoch(trainer: Any, loops: list[Any]) -> None:
    """The loops are to go on in the middle of an epoch, as with a checkpoint."""
    for loop in loops:
        loop._loaded_from_state_dict = loop._resuming_from_checkpoint = True
    trainer.fit_loop.restarting = True


def begin_epoch(trainer: Any) -> None:
    """Call the hooks of an epoch's beginning, as Lightning does only where an epoch is not resumed."""
    call: Any = importlib.import_module(f"{trainer.strategy.package}.trainer.call")
    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def load_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """But for weights, optimizers and loops."""
    connector, module = trainer._checkpoint_connector, trainer.lightning_module
    connector._loaded_checkpoint = checkpoint
    try:
        module.on_load_checkpoint(checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = {}


def name_and_version(logger: Any) -> tuple[Any, Any]:
    return getattr(logger, "_name", None), logger.version


def set_name_and_version(logger: Any, name: Any, version: Any) -> None:
    for attribute, value in (("_name", name), ("_version", version)):
        if hasattr(logger, attribute):
            setattr(logger, attribute, value)


def log_hyperparameters(trainer: Any) -> None:
    """And the graph, by all loggers."""
    importlib.import_module(f"{trainer.strategy.package}.loggers.utilities")._log_hyperparams(trainer)
