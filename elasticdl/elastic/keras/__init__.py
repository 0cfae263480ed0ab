"""Elastic training for your own Keras loop.

    import elasticdl.elastic.keras as elastic

    elastic.init(global_batch_size=256, max_gpu_batch_size=64)
    loader = elastic.DataLoader(dataset)
    state = elastic.KerasState(model=model, optimizer=optimizer, loss=loss, loader=loader)

    @elastic.run
    def train(state):
        for epoch in state.loader.epochs(10):
            for batch in state.loader:                  # one global batch
                state.make_step(batch)                  # this worker's micro-batches, then the mean gradient of all
                state.commit()

    train(state)

Started by ``elasticdl run --num_workers 2-4 -- python train.py`` the loop goes on while workers come and go; started by
``python train.py`` it runs alone. A process takes part in one job, so the functions here speak of that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.keras import models
from elasticdl.elastic.keras.keras_evaluator import KerasEvaluator, name_metrics
from elasticdl.elastic.keras.keras_state import KerasState as _State
from elasticdl.elastic.keras.loader import Dataset, ElasticDataLoader, load, own
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.training.evaluation import Metrics

__all__ = ["DataLoader", "KerasState", "LearningRate", "context", "evaluate", "init", "models", "rank", "run", "size"]

init, context, rank, size, run = own.init, own.context, own.rank, own.size, own.run


def DataLoader(dataset: Dataset, *, shuffle: bool = True, drop_last: bool = False) -> ElasticDataLoader:
    """An `ElasticDataLoader` with the batch sizes given to `init`, as in the example above (docs/library.md).

    Args:
        dataset: anything with ``len()`` whose samples are pairs (inputs, labels), as `elasticdl.data.Arrays`.
        shuffle: a new order of samples each epoch, a function of the seed and the epoch; else the data set's own.
        drop_last: leave out the last global batch of an epoch if it is smaller.

    Raises:
        UserError: `init` has not been called, the data set is empty, or smaller than a global batch with ``drop_last``.
    """
    return ElasticDataLoader(context(), dataset, shuffle=shuffle, drop_last=drop_last)


def KerasState(
    *,
    model: Any,
    optimizer: Any,
    loss: Callable[[Any, Any], Any],
    loader: ElasticDataLoader,
    learning_rate: LearningRate | None = None,
    **values: Any,
) -> _State:
    """The training state of this process, which survives a change of workers, as in the example above (docs/library.md).

    Builds the model, if it is not built yet, and traces it on two samples, so that no other worker has to wait for that.

    Args:
        model: a ``keras.Model``.
        optimizer: one of Keras's.
        loss: ``loss(labels, predictions)``, one of Keras's, or a function that returns the mean or one value per sample.
        loader: what `DataLoader` has returned.
        learning_rate: rules by which the learning rate goes; without them the optimizer's own holds.
        **values: travel along, as attributes of the state.

    Raises:
        UserError: model or optimizer are none of Keras's, or the learning rate's rules don't fit the batch sizes.
    """
    inputs, labels = load(loader.dataset, np.arange(min(2, len(loader.dataset))))
    if callable(model) and not getattr(model, "built", True):
        model(inputs)
    train_step = TrainStep(model, loss, optimizer)
    context().warm_up(train_step, inputs, labels)
    state = _State(context(), train_step, loader, values)
    if learning_rate is not None:
        state.follow(learning_rate)
    return state


def evaluate(model: Any, dataset: Dataset, metrics: Metrics) -> dict[str, float]:
    """Metrics over all samples of a data set, each counted once: ``elastic.evaluate(model, held_out, {"accuracy": accuracy})``.

    Each worker runs a part; all call it alike, between two steps, or in a script that does nothing else (docs/library.md). If a worker
    is lost meanwhile, it begins anew in the next world.

    Args:
        model: a ``keras.Model`` that is built.
        dataset: as of `DataLoader`.
        metrics: functions ``(labels, outputs) -> float`` of all samples, or metrics of Keras.

    Returns:
        The metrics by name, the same on all workers.

    Raises:
        UserError: outputs or labels have no row for each sample, or `init` has not been called.
        WorldBroken: a worker was lost; `@elastic.run` knows what to do.
    """
    job = context()
    return own.evaluate(KerasEvaluator(model, dataset, None, name_metrics(metrics), job.policy.most_at_once, job))
