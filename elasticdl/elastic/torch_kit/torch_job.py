"""One process's part in a job that trains with PyTorch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.opening import open_collective
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.torch_kit.first_seed import seed_torch
from elasticdl.elastic.torch_kit.gpu import choose_device, count_gpus
from elasticdl.elastic.torch_kit.own_optimizers import look_before_steps
from elasticdl.elastic.torch_kit.torch_adapter import TorchTensors
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.runtime import ScriptRuntime

FORBIDDEN = "forbidden steps"


class ElasticContext(JobContext):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    divides_batches = True  # as there is no `fit`

    def __init__(self, session: Session, collective: Collective, policy: BatchPolicy, seed: int) -> None:
        super().__init__(session, collective, policy, seed)
        self.device = choose_device()

    def forbid_steps(self, why: str) -> None:
        def refuse(*_: Any) -> NoReturn:
            raise UserError(why)

        look_before_steps(FORBIDDEN, refuse)

    def allow_steps(self) -> None:
        look_before_steps(FORBIDDEN, None)

    @classmethod
    def _open_collective(cls, endpoint: Endpoint | None, engine: str) -> Collective:
        return open_collective(endpoint, engine, TorchTensors())


own = ScriptRuntime(ElasticContext, seed_torch, count_gpus)  # the job that a script of one's own takes part in


def sum_of_all(job: ElasticContext, mine: float) -> float:
    """The sum over all workers, for `elastic.mean`.

    Raises:
        WorldBroken: a worker is lost.
    """
    total = torch.tensor([mine], dtype=torch.float64)
    with job.waiting():
        job.collective.sum_asked(total, "elastic.mean()")
    return float(total)
