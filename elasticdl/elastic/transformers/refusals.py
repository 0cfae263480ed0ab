"""What can't be had with workers that come and go, found before training begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import IterableDataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.prepare import WRAPPERS

SEARCH = "hyperparameter_search trains several times, and a script trains once"
STAYS = "divides the model among workers that must stay"


def require_elastic(trainer: Any) -> None:
    """Raises:
    UserError: this trainer can't train elastically; one line says why, and what to do.
    """
    for why in _reasons(trainer):
        raise UserError(f"elastic.transformers: {why}")


def _reasons(trainer: Any) -> Iterator[str]:
    if not hasattr(trainer, "_run_epoch"):
        yield f"transformers {transformers.__version__} is too old: install 5.3 or a later version"
        return
    args, data = trainer.args, trainer.train_dataset
    if trainer.model is None:  # it is made anew for each of several trainings
        yield SEARCH
    if _has_group() or args.world_size > 1:
        yield "torch.distributed is initialized, as by torchrun: start the script by `python` or by `elasticdl run`"
    if args.n_gpu > 1:
        yield f"it sees {args.n_gpu} GPUs, and a worker trains on one: set CUDA_VISIBLE_DEVICES to one of them"
    if trainer.is_deepspeed_enabled:
        yield f"DeepSpeed {STAYS}: leave `deepspeed` out"
    if trainer.is_fsdp_enabled or args.fsdp:
        yield f"FSDP {STAYS}: leave `fsdp` out"
    if args.parallelism_config is not None:
        yield f"parallelism_config {STAYS}: leave it out"
    if _is_divided(trainer):
        yield "the model is divided over several devices: leave device_map and tp_plan out"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the batch size: give per_device_train_batch_size"
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        yield (
            f"the training data is a {type(data).__name__}, and what is only iterated over can't be divided among workers that "
            "come and go: give a data set with __len__ and __getitem__"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or optimizer.endswith("_layerwise"):
        yield f"optim='{optimizer}' steps during the backward pass, before other workers' gradients are there: take another"
    for name, module in trainer.model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS or kind is torch.nn.SyncBatchNorm:
                why = WRAPPERS.get(kind.__name__, "it needs a process group")
                yield f"{name or 'the model'} is a {kind.__name__}: {why}"


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_divided(trainer: Any) -> bool:
    return (
        trainer.is_model_parallel
        or getattr(trainer, "is_distributed_loading_by_transformers", False)
        or (getattr(trainer.model, "tp_size", None) or 1) > 1
    )
