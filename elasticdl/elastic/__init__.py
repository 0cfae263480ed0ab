"""The library that a training script imports: membership, the elastic loop, the batch plan, commit and restore.

After ``elastic.torch.init(...)`` or ``elastic.keras.init(...)`` this module tells how a step is divided at present:
``steps``, ``batch_size``, ``global_batch_size``, ``gpus`` and ``master``.

Framework-free modules live here; what differs between frameworks is in ``elastic.torch`` and ``elastic.keras``.
Nothing here imports the master or the worker. Only ``elastic.collectives.horovod`` imports horovod, when it is asked to.
"""

import importlib
import importlib.util
from typing import Any

from elasticdl.common.errors import UserError, how_to_install
from elasticdl.common.reason import tell_uncaught_in_one_line

for _name in ("numpy", "fsspec"):  # PyTorch alone brings no numpy, and TensorFlow no fsspec
    if importlib.util.find_spec(_name) is None:
        tell_uncaught_in_one_line()
        raise UserError(f"elasticdl.elastic needs {_name}, which is not installed: {how_to_install('worker')}")

steps: int
"""Micro-batches per optimizer step of the worker that has most: ⌈G / (M N)⌉ for global batches of G samples, N workers, and at most M in
a micro-batch. Before the first world it is the number of one that is alone.

Raises:
    UserError: `init` has not been called.
"""
batch_size: int
"""Samples of a micro-batch of the worker with the largest share: ⌈G / (steps N)⌉, never above ``max_gpu_batch_size``."""
global_batch_size: int
"""Samples per optimizer step, over all workers."""
gpus: int
"""Workers of the present world; alone the GPUs that the script computes on."""
master: bool
"""Whether this process is the one that writes what is to be written once: rank 0."""

_NUMBERS = ("steps", "batch_size", "global_batch_size", "gpus", "master")


def __getattr__(name: str) -> Any:
    if name not in _NUMBERS:  # Python asks here for each submodule that is yet to be imported
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported here, as most of what imports this package does not need it.
    return importlib.import_module("elasticdl.elastic.training.batch_shape").job.number(name)
