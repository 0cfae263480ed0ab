"""How a master on a cluster tells that the job is over, so that nobody starts another: insistently, within bounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol

from elasticdl.common.errors import UnreachableError
from elasticdl.master.core.instructions import Phase
from elasticdl.master.launchers.kubernetes.api import ApiFailure
from elasticdl.master.launchers.kubernetes.backoff import Backoff
from elasticdl.master.launchers.kubernetes.state_config_map import ClusterState

# For the cluster to answer at the beginning, and to take the last word at the end.
PATIENCE = 120.0


class JobApi(Protocol):
    """The master's own Job. Blocks; raises `ApiFailure`."""

    def patch_job(self, change: dict[str, Any]) -> dict[str, Any]: ...


async def conclude(job: JobApi, state: ClusterState, status: str, phase: Phase) -> None:
    """Write down how the job has ended; unless it succeeded, have the Job start no other master.

    Raises:
        UnreachableError: the cluster does not take it.
    """
    deadline, backoff = asyncio.get_running_loop().time() + PATIENCE, Backoff(random.Random())
    while True:
        try:
            await state.finish(status)
            break
        except OSError as error:
            delay = backoff.delay()
            if asyncio.get_running_loop().time() + delay > deadline:
                raise UnreachableError(f"can't write down how the job has ended: {error}") from error
        await asyncio.sleep(delay)
    if phase is not Phase.SUCCEEDED:
        await insist(lambda: job.patch_job({"spec": {"backoffLimit": 0}}), "end the job")


async def insist(request: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
    """Ask until there is an answer, within bounds.

    Raises:
        UnreachableError: there was none, or it was no.
    """
    deadline, backoff = asyncio.get_running_loop().time() + PATIENCE, Backoff(random.Random())
    while True:
        try:
            return await asyncio.to_thread(request)
        except ApiFailure as failure:
            delay = backoff.delay(failure.retry_after)
            if asyncio.get_running_loop().time() + delay > deadline:
                raise UnreachableError(f"can't {what}: {failure}") from failure
        await asyncio.sleep(delay)
