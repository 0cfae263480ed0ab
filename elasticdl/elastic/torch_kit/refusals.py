"""What can't be had, with workers that come and go, of a script's model, optimizer and loader: each is refused in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.optimizers import require_summable

# By the name of their type, as some are in packages that may not be installed.
WRAPPERS = {
    "DistributedDataParallel": "give the module within: gradients are summed anyway",
    "DataParallel": "give the module within: each worker has one device",
    "FullyShardedDataParallel": "each worker holds the whole model",
    "FSDPModule": "each worker holds the whole model",
}
ITERATED_PLAINLY = ("torch", "accelerate")  # whose loaders give what torch's gives
TRAINS_ONCE = "trains several times, and a script trains once"


def refuse(who: str, reasons: Iterable[str]) -> None:
    """``who``: has been given what is refused. ``reasons``: what can't be had, and what to do instead.

    Raises:
        UserError: there is a reason, of which the first is told.
    """
    for why in reasons:
        raise UserError(f"{who}: {why}")


def require_plain(model: Any, optimizer: Any, who: str = "elastic.prepare") -> None:
    """Raises:
    UserError: they are made for another way of training on several devices, or can't be had.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{who}: the model is a {type(model).__name__}; expected one torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{who}: the optimizer is a {type(optimizer).__name__}; expected one of torch.optim")
    require_summable(optimizer, who)
    refuse(who, of_group())
    refuse(who, of_modules(model))


def of_group() -> Iterator[str]:
    if dist.is_available() and dist.is_initialized():
        launched = (
            "; RANK is in the environment, by which libraries do so of themselves: unset it, WORLD_SIZE and MASTER_ADDR"
        )
        yield (
            "torch.distributed is initialized: leave init_process_group out, as workers come and go, and find each other "
            f"through the job{launched if 'RANK' in os.environ else ''}"
        )


def of_modules(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        what = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.nn.SyncBatchNorm):
            yield f"{what}, which needs a process group: leave convert_sync_batchnorm out"
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS:
                yield f"{what}: {WRAPPERS[kind.__name__]}"


def of_data(data: Any) -> Iterator[str]:
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        yield (
            f"the training data is a {type(data).__name__}, and what is only iterated over can't be divided among workers that come and go: "
            "give a data set with __len__ and __getitem__"
        )


def of_loader(loader: Any) -> Iterator[str]:
    """Why it can't be loaded in parts."""
    if not isinstance(loader, DataLoader):
        yield f"the loader is a {type(loader).__name__}; expected a torch.utils.data.DataLoader"
        return
    if any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__):
        yield (
            "the loader is a StatefulDataLoader, whose state says nothing where a batch is loaded in parts: take torch.utils.data.DataLoader; what "
            "`elasticdl stop` keeps has the place within the epoch"
        )
    for name in ("__iter__", "_get_iterator"):
        own = next((kind for kind in type(loader).__mro__ if name in vars(kind)), DataLoader)
        if own.__module__.partition(".")[0] not in ITERATED_PLAINLY:
            yield (
                f"the loader is a {own.__name__}, whose own {name} is not called where a batch is loaded in parts: "
                "do what it does in collate_fn, in the sampler or in the training step"
            )
    if isinstance(loader.dataset, IterableDataset):
        yield from of_data(loader.dataset)
    if loader.batch_sampler is None:
        yield "DataLoader(batch_size=None) makes no batches: give it a batch_size"
    try:
        batches = len(loader)
    except TypeError:
        yield "the loader's sampler has no length; expected one with __len__"
    else:
        if not batches:
            yield "the loader has no batch; expected at least one in an epoch"
