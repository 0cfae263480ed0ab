"""How a master on a cluster tells that the job is over, so that the Job starts no other: repeated, within bounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from elasticdl.kubernetes.retry import Backoff, retry
from elasticdl.master.core.instructions import Phase
from elasticdl.master.launchers.kubernetes.ports import OwnJobApi
from elasticdl.master.launchers.kubernetes.state_config_map import ClusterState

# For the cluster to answer at the beginning, and to take the last status at the end.
PATIENCE = 120.0
T = TypeVar("T")


async def finalize(job: OwnJobApi, state: ClusterState, status: str, phase: Phase) -> None:
    """Write down how the job has ended; unless it succeeded, have the Job start no other master.

    Raises:
        UnreachableError: the cluster does not take it.
    """
    backoff = Backoff(random.Random())
    await retry(lambda: state.finish(status), "write down how the job has ended", backoff, PATIENCE)
    if phase is not Phase.SUCCEEDED:
        await request(lambda: job.patch_job({"spec": {"backoffLimit": 0}}), "end the job")


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer; raises as `finalize`."""
    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), PATIENCE)
