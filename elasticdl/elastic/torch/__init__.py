"""Elastic training for your own PyTorch loop. One that knows nothing of other workers becomes elastic by `prepare`:

    import elasticdl.elastic.torch as elastic
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)

Or the loop is written for it:

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

from collections.abc import Sized
from typing import Any

from elasticdl.triton_first import require_triton_first

require_triton_first("elasticdl.elastic.torch")

import torch
from torch.utils.data import Dataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.loaders import Collate, ElasticDataLoader, ElasticSampler, StepBatch
from elasticdl.elastic.torch_kit.tensors import own
from elasticdl.elastic.torch_kit.torch_state import TorchState as _State

__all__ = [
    "DataLoader",
    "LearningRate",
    "Sampler",
    "StepBatch",
    "TorchState",
    "catching_up",
    "context",
    "device",
    "evaluate",
    "init",
    "mean",
    "on_one",
    "prepare",
    "rank",
    "run",
    "size",
    "values",
]

init, context, size, run = own.init, own.context, own.size, own.run
_loop = PlainLoop(own)
prepare, mean, catching_up, rank = _loop.prepare, _loop.mean, _loop.catching_up, _loop.rank
values, on_one, evaluate = _loop.values, _loop.on_one, _loop.evaluate


def device() -> torch.device:
    """Where this worker computes, the GPU it was given or the CPU: ``model.to(elastic.device())`` (docs/library.md).

    Raises:
        UserError: `init` has not been called.
    """
    return context().device


def DataLoader(
    dataset: Dataset[Any],
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
) -> ElasticDataLoader:
    """An `ElasticDataLoader` with the batch sizes given to `init`: it yields one `StepBatch` per step, as in the example above
    (docs/library.md).

    Args:
        dataset: with ``len()``, and samples by index.
        shuffle: a new order of samples each epoch, a function of the seed and the epoch; else the data set's own.
        drop_last: leave out the last global batch of an epoch if it is smaller.
        num_workers: processes that load samples ahead; 0: load in this one.
        collate_fn: makes a micro-batch of a list of samples; None: torch's own.

    Raises:
        UserError: `init` has not been called, the data set is empty, or smaller than a global batch with ``drop_last``.
    """
    return ElasticDataLoader(
        context(), dataset, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers, collate_fn=collate_fn
    )


def Sampler(data: Sized | int, *, shuffle: bool = True, drop_last: bool = False) -> ElasticSampler:
    """An `ElasticSampler` for a ``torch.utils.data.DataLoader`` of your own.

    ``loader = DataLoader(dataset, batch_sampler=sampler, ...)``, and then ``for batch in sampler.steps(loader)`` (docs/library.md).

    Args:
        data: the data set, or the number of its samples.
        shuffle: a new order of samples each epoch, a function of the seed and the epoch.
        drop_last: leave out the last global batch of an epoch if it is smaller.

    Raises:
        UserError: `init` has not been called, the data set is empty, or smaller than a global batch with ``drop_last``.
    """
    return ElasticSampler(context(), data, shuffle=shuffle, drop_last=drop_last)


def TorchState(
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ElasticDataLoader | None = None,
    sampler: ElasticSampler | None = None,
    learning_rate: LearningRate | None = None,
    **values: Any,
) -> _State:
    """The training state of this process, which survives a change of workers: ``elastic.TorchState(model=model, optimizer=optimizer,
    loader=loader, best=0.0)`` (docs/library.md).

    Args:
        model: the module that is trained.
        optimizer: one of torch's, unwrapped: its ``step()`` sums the gradients of all workers first.
        loader: what `DataLoader` has returned.
        sampler: instead of ``loader``, what `Sampler` has returned.
        learning_rate: rules by which the learning rate goes; without them the optimizer's own holds.
        **values: travel along, as attributes of the state: objects with ``state_dict`` and ``load_state_dict`` by these, others
            pickled.

    Raises:
        UserError: not one of ``loader`` and ``sampler`` is given, or the learning rate's rules don't fit the batch sizes.
    """
    if (loader is None) == (sampler is None):
        raise UserError(
            "TorchState(loader=, sampler=): give one of them; a loader brings its own sampler, and a loader that is not elasticdl's is for elastic.prepare"
        )
    data = sampler if loader is None else loader
    state = _State(context(), model, optimizer, data, values)
    if learning_rate is not None:
        state.follow(learning_rate)
    return state
