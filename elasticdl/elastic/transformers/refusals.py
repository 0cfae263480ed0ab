"""What can't be had with workers that come and go, found before training begins."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.prepare import WRAPPERS

# By the beginning of their name: they change parameters during the backward pass, or have no `step`.
OPTIMIZERS_WITHIN_BACKWARD = ("lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise")


def require_elastic(trainer: Any) -> None:
    """Raises:
    UserError: this trainer can't train elastically; one line says why, and what to do.
    """
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    refused = {
        "torch.distributed is initialized, as by torchrun: start the script by `python` or by `elasticdl run`": _has_group(),
        f"{args.world_size} processes were started for it: start the script by `python` or by `elasticdl run`": args.world_size > 1,
        f"it sees {args.n_gpu} GPUs, and each worker trains on one: set CUDA_VISIBLE_DEVICES to one of them": args.n_gpu > 1,
        "DeepSpeed divides the model among workers that must stay: leave `deepspeed` out": trainer.is_deepspeed_enabled,
        "FSDP divides the model among workers that must stay: leave `fsdp` out": trainer.is_fsdp_enabled or bool(args.fsdp),
        "parallelism_config divides the model among workers that must stay: leave it out": bool(args.parallelism_config),
        "the model is divided over several devices: leave device_map and tp_plan out": _is_divided(trainer),
        "auto_find_batch_size changes the batch size: give per_device_train_batch_size": args.auto_find_batch_size,
        "an IterableDataset can't be divided among workers that come and go: give a data set with __len__ and __getitem__": (
            isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__getitem__")
        ),
        f"the optimizer {optimizer} steps during the backward pass, before the gradients of other workers are there: take another "
        "`optim`": optimizer.startswith(OPTIMIZERS_WITHIN_BACKWARD) or optimizer.endswith("_layerwise"),
        "hyperparameter_search trains several times, and a script trains once": trainer.hp_search_backend is not None,
    }
    for text, holds in refused.items():
        if holds:
            raise UserError(f"elastic.transformers: {text}")
    for name, module in trainer.model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS or kind is torch.nn.SyncBatchNorm:
                why = WRAPPERS.get(kind.__name__, "it needs a process group")
                raise UserError(f"elastic.transformers: {name or 'the model'} is a {kind.__name__}: {why}")


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_divided(trainer: Any) -> bool:
    return (
        trainer.is_model_parallel
        or getattr(trainer, "is_distributed_loading_by_transformers", False)
        or (getattr(trainer.model, "tp_size", None) or 1) > 1
    )
