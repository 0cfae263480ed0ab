"""The library that a training script imports: membership, the elastic loop, the batch plan, commit and restore.

Framework-free modules live here; what differs between frameworks is in ``elastic.torch`` and ``elastic.keras``.
Nothing here imports the master or the worker. Only ``elastic.collectives.horovod`` imports horovod, when it is asked to.

After ``elastic.torch.init(...)`` or ``elastic.keras.init(...)`` this module tells how a step is divided at present:
``steps``, ``batch_size``, ``global_batch_size``, ``gpus`` and ``master``; see `elasticdl.elastic.training.batch_shape`.
"""

import importlib
from typing import Any

_NUMBERS = ("steps", "batch_size", "global_batch_size", "gpus", "master")


def __getattr__(name: str) -> Any:
    if name not in _NUMBERS:  # Python asks here for each submodule that is yet to be imported
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported here, as most of what imports this package does not need it.
    return importlib.import_module("elasticdl.elastic.training.batch_shape").job.number(name)
