"""One process's part in a job that trains with PyTorch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.torch_kit.collective import TorchCollective, open_collective
from elasticdl.elastic.torch_kit.first_seed import seed_torch
from elasticdl.elastic.torch_kit.gpu import choose_device, count_gpus
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.runtime import ScriptRuntime


class ElasticContext(JobContext[TorchCollective]):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    divides_batches = True  # as there is no `fit`

    def __init__(self, session: Session, collective: TorchCollective, policy: BatchPolicy, seed: int) -> None:
        super().__init__(session, collective, policy, seed)
        self.device = choose_device()
        self._forbids: RemovableHandle | None = None

    def forbid_steps(self, why: str) -> None:
        def refuse(*_: Any) -> NoReturn:
            raise UserError(why)

        if self._forbids is None:
            self._forbids = register_optimizer_step_pre_hook(refuse)

    def allow_steps(self) -> None:
        if self._forbids is not None:
            self._forbids.remove()
            self._forbids = None

    @classmethod
    def _open_collective(cls, endpoint: Endpoint | None, engine: str) -> TorchCollective:
        return open_collective(endpoint, engine, has_gpu=choose_device().type != "cpu")


own = ScriptRuntime(ElasticContext, seed_torch, count_gpus)  # the job that a script of one's own takes part in


def sum_of_all(job: ElasticContext, mine: float) -> float:
    """The sum over all workers, for `elastic.mean`.

    Raises:
        WorldBroken: a worker is lost.
    """
    total = torch.tensor([mine], dtype=torch.float64)
    job.advance(Activity.WAIT)
    try:
        job.collective.sum_asked(total, "elastic.mean()")
    finally:
        job.advance(Activity.UPDATE)
    return float(total)
