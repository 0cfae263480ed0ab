"""What can't be had of a trainer or a module is refused in one line."""

from __future__ import annotations

from typing import Any

from torch.utils.data.distributed import DistributedSampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.prepare import require_plain
from elasticdl.elastic.torch_kit.data.own_loader import OwnLoader

WHO = 'Trainer(strategy="elastic")'
SECOND_PASS = (
    f"{WHO}: the closure of a step was evaluated again after its gradients were summed, as for sharpness-aware minimization; of the new "
    "gradients each worker would have its own part's: take manual optimization"
)
OWN_OPTIMIZER = "have configure_optimizers return it, its parameters as a group of the one optimizer, or several optimizers with manual optimization"

# Callbacks; of either of Lightning's packages.
TRY_OUT = ("LearningRateFinder", "BatchSizeFinder")
EXCHANGE_SCHEDULERS = ("StochasticWeightAveraging",)


def require_trainer(trainer: Any, who: str) -> None:
    """Raises:
    UserError: it is told what only one that trains otherwise on several devices can do.
    """
    connector = trainer._accelerator_connector
    devices, nodes = connector._parallel_devices, connector._num_nodes_flag
    if nodes > 1:
        raise UserError(f"{who}: num_nodes={nodes}; leave it out, as the job gives each worker its machine")
    if len(devices) > 1 and len(devices) != connector.accelerator.auto_device_count():
        raise UserError(f"{who}: devices={len(devices)}; expected one, as the job starts a worker for each device")
    if connector._layer_sync is not None:
        raise UserError(f"{who}: sync_batchnorm=True needs a process group: leave it out")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise UserError(
            f"{who}: val_check_interval is a time, which each worker would measure for itself: give batches or a part of an epoch"
        )


def require_one_training(trainer: Any, who: str) -> None:
    """Raises:
    UserError: a callback, which may be a Tuner's, trains before the training, or changes what newcomers can't be sent.
    """
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in TRY_OUT:
                raise UserError(
                    f"{who}: {kind.__name__} trains several times, and under `elasticdl run` a script trains once: let the "
                    "script run alone to find the value, and write that into it"
                )
            if kind.__name__ in EXCHANGE_SCHEDULERS:
                raise UserError(
                    f"{who}: {kind.__name__} exchanges the scheduler while it trains, and a worker that comes later would keep "
                    "the first one: leave it out under `elasticdl run`"
                )


def require_module(module: Any, optimizers: list[Any], who: str) -> None:
    """Raises:
    UserError: the module trains in a way that can't be had.
    """
    if not any(each.param_groups for each in optimizers):  # for None Lightning has one that does nothing
        raise UserError(f"{who}: configure_optimizers returns no optimizer; expected one")
    for optimizer in optimizers:
        require_plain(module, optimizer, who)


def require_loader(loader: Any, who: str) -> None:
    """Raises:
    UserError: it is divided among devices already, or can't be divided.
    """
    OwnLoader(loader, who)
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise UserError(
                f"{who}: the train loader has a {type(sampler).__name__}; leave it out, as each batch is divided anyway"
            )
