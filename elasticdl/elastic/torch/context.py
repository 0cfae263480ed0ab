"""One process's part in a job that trains with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Dataset

from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.session.connection import MasterConnection
from elasticdl.elastic.session.session import Session
from elasticdl.elastic.torch.collective import TorchCollective
from elasticdl.elastic.torch.device import choose_device
from elasticdl.elastic.torch.loader import ElasticDataLoader, LoaderOptions
from elasticdl.elastic.torch.sampler import ElasticSampler
from elasticdl.elastic.torch.state import TorchState
from elasticdl.elastic.training.context import JobContext, open_context


class ElasticContext(JobContext[TorchCollective]):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    divides_batches = True  # as there is no `fit`

    def __init__(self, session: Session, collective: TorchCollective, policy: BatchPolicy, seed: int) -> None:
        super().__init__(session, collective, policy, seed)
        self.device = choose_device()

    def sampler(self, data: Sized | int, *, shuffle: bool = True, drop_last: bool = False) -> ElasticSampler:
        """``data``: the data set, or the number of its samples."""
        return ElasticSampler(self.order(data, shuffle=shuffle, drop_last=drop_last), self)

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        options: LoaderOptions | None = None,
    ) -> ElasticDataLoader:
        sampler = self.sampler(dataset, shuffle=shuffle, drop_last=drop_last)  # type: ignore[arg-type]
        return ElasticDataLoader(dataset, sampler, options or LoaderOptions(), self.device)

    def state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ElasticDataLoader | ElasticSampler | None,
        values: dict[str, Any],
        *,
        snapshot: bool = False,
    ) -> TorchState:
        return TorchState(self, model, optimizer, data, values, snapshot=snapshot)


def connect(
    policy: BatchPolicy, *, seed: int, environ: Mapping[str, str], link: MasterConnection | None = None
) -> ElasticContext:
    """The context of this process: under the master that the environment names, or alone.

    ``link``: the open link to that master, if there is one already; the context closes it.

    Raises:
        UserError: the environment is unusable, or Horovod is missing.
    """
    return open_context(
        lambda session, collective: ElasticContext(session, collective, policy, seed),
        lambda endpoint: TorchCollective.open(endpoint, has_gpu=choose_device().type == "cuda"),
        environ,
        link,
    )
