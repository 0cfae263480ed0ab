"""Which engine a worker takes."""

from __future__ import annotations

import importlib
from types import ModuleType

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.horovod import HorovodCollective, HorovodWorld, require_horovod, takes_horovod
from elasticdl.elastic.collectives.port import Collective, TensorAdapter
from elasticdl.elastic.link.store import Endpoint, KvServer


def open_collective(endpoint: Endpoint | None, engine: str, tensors: TensorAdapter) -> Collective:
    """For worlds of one, without any engine, if there is no endpoint. ``engine``: as ``--collective``.

    Raises:
        UserError: what is asked for can't be used.
    """
    if endpoint is None:
        return Collective(tensors)
    if endpoint.processes is None and (hvd := require_collective(engine, tensors)) is not None:
        return HorovodCollective(tensors, hvd, HorovodWorld(hvd, KvServer(endpoint.store), endpoint.interface))
    from elasticdl.elastic.collectives.torch_distributed import TorchDistributed
    from elasticdl.elastic.collectives.torch_groups import can_use_nccl
    from elasticdl.elastic.collectives.torch_inside import TorchOfSeveral

    by_nccl = tensors.has_gpu and tensors.lends_gpu_memory and can_use_nccl()
    kind = TorchOfSeveral if endpoint.processes else TorchDistributed
    return kind(tensors, endpoint, by_nccl=by_nccl)


def require_collective(engine: str, tensors: TensorAdapter) -> ModuleType | None:
    """Horovod's module for the framework; None where torch.distributed is to be taken.

    Raises:
        UserError: what ``--collective`` names is not installed.
    """
    if takes_horovod(engine, tensors):
        return require_horovod(tensors)
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UserError(
            f"Horovod with {tensors.title}, or PyTorch (--collective torch), is needed; neither can be imported "
            f"({error}): install torch, or build Horovod with `make setup`"
        ) from error
    return None
