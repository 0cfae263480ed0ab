"""What can't be had of a trainer of Lightning or its module with workers that come and go: each is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from elasticdl.elastic.torch_kit.refusals import TRAINS_ONCE, of_loader, refuse, require_plain

WHO = 'Trainer(strategy="elastic")'
SECOND_PASS = (
    f"{WHO}: the closure of a step was evaluated again after its gradients were summed, as for sharpness-aware minimization; of the new "
    "gradients each worker would have its own part's: take manual optimization"
)
OWN_OPTIMIZER = "have configure_optimizers return it, its parameters as a group of the one optimizer, or several optimizers with manual optimization"

# Callbacks; of either of Lightning's packages.
CANT_BE_HAD = {
    **dict.fromkeys(
        ("LearningRateFinder", "BatchSizeFinder"),
        f"{TRAINS_ONCE} under `elasticdl run`: let the script run alone to find the value, and write that into it",
    ),
    "StochasticWeightAveraging": "exchanges the scheduler while it trains, and a worker that comes later would keep the first one: leave it out "
    "under `elasticdl run`",
}


def require_trainer(trainer: Any, who: str) -> None:
    """Raises:
    UserError: it is told what only one that trains otherwise on several devices can do.
    """
    refuse(who, _of_trainer(trainer))


def require_one_training(trainer: Any, who: str) -> None:
    """Raises:
    UserError: a callback, which may be a Tuner's, trains before the training, or changes what newcomers can't be sent.
    """
    kinds = (kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__)
    refuse(who, (f"{name} {CANT_BE_HAD[name]}" for name in kinds if name in CANT_BE_HAD))


def require_module(module: Any, optimizers: list[Any], who: str) -> None:
    """Raises:
    UserError: the module trains in a way that can't be had.
    """
    if not any(each.param_groups for each in optimizers):  # for None Lightning has one that does nothing
        refuse(who, ["configure_optimizers returns no optimizer; expected one"])
    for optimizer in optimizers:
        require_plain(module, optimizer, who)


def require_loader(loader: Any, who: str) -> None:
    """Raises:
    UserError: it is divided among devices already, or can't be divided.
    """
    refuse(who, of_loader(loader))
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            name = type(sampler).__name__
            refuse(who, [f"the train loader has a {name}; leave it out, as each batch is divided anyway"])


def _of_trainer(trainer: Any) -> Iterator[str]:
    connector = trainer._accelerator_connector
    devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
    if nodes > 1:
        yield f"num_nodes={nodes}; leave it out, as the job gives each worker its machine"
    if devices > 1 and devices != connector.accelerator.auto_device_count():
        yield f"devices={devices}; expected one, as the job starts a worker for each device"
    if connector._layer_sync is not None:
        yield "sync_batchnorm=True needs a process group: leave it out"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time, which each worker would measure for itself: give batches or a part of an epoch"
