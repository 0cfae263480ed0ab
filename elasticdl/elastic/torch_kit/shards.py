"""How the processes of one worker, which share a model, share its part of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Inside
from elasticdl.elastic.core.plan import WHOLE, Spread
from elasticdl.elastic.torch_kit.tensors import is_sharded

NOT_SHARED = (
    "this worker has {} processes (--processes_per_worker), and the model is whole in each: shard it before, as by "
    "torch.distributed.fsdp.fully_shard(model) or parallelize_module, or leave the option out"
)

PARTLY = (
    "{} is not sharded, so nobody would sum its gradients over the processes of a worker, which FSDP gives samples of their own: call "
    "fully_shard(model) last, on the whole model, without ignored_params"
)


def spread_of(modules: Sequence[torch.nn.Module], inside: Inside) -> Spread:
    """
    Raises:
        UserError: the model is not sharded, or not as a whole.
    """
    if inside.size == 1:
        return WHOLE
    every = [module for root in modules for module in root.modules()]
    if not any(is_sharded(parameter) for module in every for parameter in module.parameters(recurse=False)):
        raise UserError(NOT_SHARED.format(inside.size))
    meshes = [mesh for module in every if (mesh := _data_mesh(module)) is not None]
    if not meshes:
        return Spread(counts=inside.rank == 0)
    whole = [
        name
        for root in modules
        for name, each in root.named_parameters()
        if each.requires_grad and not is_sharded(each)
    ]
    if whole:
        raise UserError(PARTLY.format(whole[0]))
    # A mesh that replicates and shards counts by rows.
    coordinate, shape = meshes[0].get_coordinate(), meshes[0].shape
    part, parts = 0, 1
    for at, size in zip(coordinate, shape, strict=True):
        part, parts = part * size + at, parts * size
    held = [0.0] * inside.size
    held[inside.rank] = float(part)
    return Spread(parts, part, counts=inside.sum(held).index(part) == inside.rank)


def _data_mesh(module: torch.nn.Module) -> Any:
    """Over which FSDP2 divides batches; None of a module that it does not know. It has no public way to ask."""
    state = getattr(module, "_get_fsdp_state", None)
    group = state()._fsdp_param_group if state is not None else None
    return group.mesh_info.mesh if group is not None else None
