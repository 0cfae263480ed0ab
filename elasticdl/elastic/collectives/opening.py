"""Which engine a worker takes."""

from __future__ import annotations

import importlib

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.horovod import HorovodCollective, is_wanted, require_horovod
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.collectives.tensor_adapter import TensorAdapter
from elasticdl.elastic.link.store import Endpoint


def open_collective(endpoint: Endpoint | None, engine: str, tensors: TensorAdapter) -> Collective:
    """For worlds of one, without any engine, if there is no endpoint. ``engine``: as ``--collective``.

    Raises:
        UserError: what is asked for can't be used.
    """
    if endpoint is None:
        return HorovodCollective(tensors)
    require_collective(engine, tensors)
    if is_wanted(engine, tensors):
        return HorovodCollective(tensors, require_horovod(tensors), endpoint)
    from elasticdl.elastic.collectives.nccl import can_use_nccl
    from elasticdl.elastic.collectives.torch_distributed import TorchDistributed

    by_nccl = tensors.has_gpu and tensors.lends_gpu_memory and can_use_nccl()
    return TorchDistributed(tensors, endpoint, by_nccl=by_nccl)


def require_collective(engine: str, tensors: TensorAdapter) -> None:
    """Raises:
    UserError: what ``--collective`` names is not installed.
    """
    if is_wanted(engine, tensors):
        require_horovod(tensors)
        return
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UserError(
            f"Horovod with {tensors.title}, or PyTorch (--collective torch), is needed; neither can be imported "
            f"({error}): install torch, or build Horovod with `make setup`"
        ) from error
