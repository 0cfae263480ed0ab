"""One process's part in a job that trains with Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.keras.backend import require_backend
from elasticdl.elastic.keras.collective import KerasCollective
from elasticdl.elastic.keras.device import count_gpus, prepare_devices
from elasticdl.elastic.keras.loader import Dataset, ElasticDataLoader
from elasticdl.elastic.keras.state import KerasState
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.session.connection import MasterConnection
from elasticdl.elastic.training.context import JobContext, open_context
from elasticdl.elastic.training.sampler import DataCursor


class ElasticContext(JobContext[KerasCollective]):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    def sampler(self, data: Sized | int, *, shuffle: bool = True, drop_last: bool = False) -> DataCursor:
        """``data``: the data set, or the number of its samples."""
        return DataCursor(self.order(data, shuffle=shuffle, drop_last=drop_last), self)

    def loader(self, dataset: Dataset, *, shuffle: bool = True, drop_last: bool = False) -> ElasticDataLoader:
        return ElasticDataLoader(dataset, self.sampler(dataset, shuffle=shuffle, drop_last=drop_last), self)

    def state(
        self, train_step: TrainStep, loader: ElasticDataLoader, values: dict[str, Any], **standing: Any
    ) -> KerasState:
        """``standing``: as `KerasState` takes it."""
        return KerasState(self, train_step, loader, values, **standing)


def connect(
    policy: BatchPolicy, *, seed: int, environ: Mapping[str, str], link: MasterConnection | None = None
) -> ElasticContext:
    """The context of this process: under the master that the environment names, or alone.

    ``link``: the open link to that master, if there is one already; the context closes it.

    Raises:
        UserError: the environment is unusable, Keras does not compute on TensorFlow, or Horovod is missing.
    """
    require_backend()
    prepare_devices()
    return open_context(
        lambda session, collective: ElasticContext(session, collective, policy, seed),
        lambda endpoint: KerasCollective.open(endpoint, has_gpu=count_gpus() > 0),
        environ,
        link,
    )
