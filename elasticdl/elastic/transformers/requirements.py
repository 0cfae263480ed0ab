"""What can't be had of a trainer of Hugging Face with workers that come and go, found before training begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers

from elasticdl.elastic.torch_kit.refusals import TRAINS_ONCE, of_data, of_group, of_modules, refuse

WHO = "elastic.transformers"
SEARCH = f"hyperparameter_search {TRAINS_ONCE}"
STAYS = "divides the model among workers that must stay"


def require_elastic(trainer: Any) -> None:
    """Raises:
    UserError: this trainer can't train elastically.
    """
    refuse(WHO, _reasons(trainer))


def _reasons(trainer: Any) -> Iterator[str]:
    if not hasattr(trainer, "_run_epoch"):
        yield f"transformers {transformers.__version__} is too old: install 5.3 or a later version"
        return
    args = trainer.args
    if trainer.model is None:  # it is made anew for each of several trainings
        yield SEARCH
    yield from of_group()
    if args.world_size > 1:
        yield "it is one of several processes, as by torchrun: start the script by `python` or by `elasticdl run`"
    if args.n_gpu > 1:
        yield f"it sees {args.n_gpu} GPUs, and a worker trains on one: set CUDA_VISIBLE_DEVICES to one of them"
    if trainer.is_deepspeed_enabled:
        yield f"DeepSpeed {STAYS}: leave `deepspeed` out"
    if trainer.is_fsdp_enabled or args.fsdp:
        yield f"FSDP {STAYS}: leave `fsdp` out"
    if args.parallelism_config is not None:
        yield f"parallelism_config {STAYS}: leave it out"
    is_divided = trainer.is_model_parallel or getattr(trainer, "is_distributed_loading_by_transformers", False)
    if is_divided or (getattr(trainer.model, "tp_size", None) or 1) > 1:
        yield "the model is divided over several devices: leave device_map and tp_plan out"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the batch size: give per_device_train_batch_size"
    yield from of_data(trainer.train_dataset)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or optimizer.endswith("_layerwise"):
        yield f"optim='{optimizer}' steps during the backward pass, before other workers' gradients are there: take another"
    yield from of_modules(trainer.model)
