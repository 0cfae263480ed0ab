"""Elastic training for your own PyTorch loop.

    import elasticdl.elastic.torch as elastic

    elastic.init(global_batch_size=256, max_gpu_batch_size=64)
    loader = elastic.DataLoader(dataset)
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @elastic.run
    def train(state):
        for epoch in state.loader.epochs(10):
            for batch in state.loader:                  # one global batch
                for images, labels in batch:            # this worker's micro-batches
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()                        # on the mean gradient over the global batch
                state.commit()

    train(state)

Started by ``elasticdl run --num_workers 2-4 -- python train.py`` the loop goes on while workers come and go; started by
``python train.py`` it runs alone. A process takes part in one job, so the functions here speak of that one.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch.utils.data import Dataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.batch_plan import BatchPolicy
from elasticdl.elastic.errors import Stopped
from elasticdl.elastic.learning_rate import LearningRate
from elasticdl.elastic.torch.context import ElasticContext, connect
from elasticdl.elastic.torch.loader import ElasticDataLoader, LoaderOptions
from elasticdl.elastic.torch.sampler import ElasticSampler, StepBatch
from elasticdl.elastic.torch.state import TorchState as _State

__all__ = [
    "DataLoader",
    "LearningRate",
    "Sampler",
    "StepBatch",
    "TorchState",
    "context",
    "device",
    "init",
    "rank",
    "run",
    "size",
]

log = logging.getLogger(__name__)

# Horovod, too, knows one world per process: the one place where that shows.
_current: list[ElasticContext] = []


def init(
    global_batch_size: int | None = None,
    max_gpu_batch_size: int | None = None,
    *,
    batch_size_per_worker: int | None = None,
    seed: int = 0,
) -> ElasticContext:
    """Join the job that this process was started for, or run alone; call it once, before building the optimizer.

    ``global_batch_size`` samples make one optimizer step whatever the number of workers, none of which runs more than
    ``max_gpu_batch_size`` at once. With ``batch_size_per_worker`` instead, the global batch grows with the workers.

    Raises:
        UserError: the numbers make no sense, Horovod is missing, or the environment is unusable.
    """
    if multiprocessing.parent_process() is not None:
        raise UserError(
            "elastic.init() was called in a process that multiprocessing started, as it imports the script anew: put what "
            'the script does below `if __name__ == "__main__":`'
        )
    if _current:
        raise UserError("elastic.init() was called before; a process takes part in one job")
    try:
        policy = BatchPolicy(global_batch_size, batch_size_per_worker, max_gpu_batch_size)
    except ValueError as error:
        raise UserError(f"elastic.init: {error}") from error
    if global_batch_size and max_gpu_batch_size and max_gpu_batch_size > global_batch_size:
        raise UserError(
            f"elastic.init: max_gpu_batch_size {max_gpu_batch_size} is above global_batch_size {global_batch_size}"
        )
    made = connect(policy, seed=seed, environ=os.environ)
    torch.manual_seed(seed)
    _current.append(made)
    atexit.register(made.close)
    return made


def context() -> ElasticContext:
    """This process's part in its job.

    Raises:
        UserError: `init` has not been called.
    """
    if not _current:
        raise UserError("call elastic.init(global_batch_size, max_gpu_batch_size) first")
    return _current[0]


def rank() -> int:
    """This worker's place in the present world."""
    return context().rank


def size() -> int:
    """Number of workers in the present world."""
    return context().size


def device() -> torch.device:
    """Where this worker computes: the GPU it was given, or the CPU."""
    return context().device


def DataLoader(
    dataset: Dataset[Any],
    *,
    shuffle: bool = True,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> ElasticDataLoader:
    """An `ElasticDataLoader` with the batch sizes given to `init`."""
    return context().loader(dataset, shuffle=shuffle, options=LoaderOptions(num_workers, collate_fn))


def Sampler(data: Sized | int, *, shuffle: bool = True) -> ElasticSampler:
    """An `ElasticSampler` over a data set, or over a number of samples, for a ``torch.utils.data.DataLoader`` of your
    own: ``loader = DataLoader(dataset, batch_sampler=sampler, ...)``, and then ``for batch in sampler.steps(loader)``."""
    return context().sampler(data, shuffle=shuffle)


def TorchState(
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ElasticDataLoader | None = None,
    sampler: ElasticSampler | None = None,
    learning_rate: LearningRate | None = None,
    snapshot: bool = False,
    **values: Any,
) -> _State:
    """The training state of this process; see `elasticdl.elastic.torch.state.TorchState`.

    Raises:
        UserError: both ``loader`` and ``sampler`` are given, or the learning rate's rules don't fit the batch sizes.
    """
    if loader is not None and sampler is not None:
        raise UserError("TorchState(loader=, sampler=): give one of them; a loader brings its own sampler")
    state = context().state(model, optimizer, loader or sampler, values, snapshot=snapshot)
    if learning_rate is not None:
        state.follow(learning_rate)
    return state


def run(train: Callable[[_State], Any]) -> Callable[[_State], Any]:
    """Make a training function elastic: called with the state, it is entered anew in each world until it returns.

    A worker that is told to leave ends its process with status 0 at the next commit.
    """

    @functools.wraps(train)
    def wrapped(state: _State) -> Any:
        job = context()
        try:
            result = job.run(lambda: train(state), state)
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
            job.close()
            sys.exit(0)
        except Exception as error:
            job.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
            job.close()
            raise
        job.finish(step=state.step, epochs=state.progress.epoch, metrics={})
        return result

    return wrapped
