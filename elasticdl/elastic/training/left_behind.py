"""What a worker that leaves for good leaves behind of its training, and what one that begins takes over."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.core.interruptions import Stopped
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.training.carried import Carried
from elasticdl.elastic.training.kept_state import KeptState
from elasticdl.elastic.training.worker_files import Handover

log = logging.getLogger(__name__)


class Leaving(Protocol):
    """A worker's part in its job."""

    session: Session
    handover: Handover | None
    kept: KeptState | None

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def may_be_last(self) -> bool: ...

    def warn(self, message: str) -> None: ...


def leave_behind(job: Leaving, state: Carried, stopped: Stopped) -> None:
    if not state.has_state:
        return
    alone = job.size == 1 or job.may_be_last
    if stopped.drained and job.handover is not None:
        _hand_over(job, state, job.handover, alone=alone)
    elif alone if stopped.drained else stopped.checkpoint and (alone or job.rank == 0):
        _keep(job, state)


def take_over(job: Leaving, state: Carried) -> None:
    """Rank 0 of a world whose members hold no state: go on from what another has left.

    Raises:
        UserError: what a stopped job has left can't be gone on from.
    """
    left = job.handover.read(state) if job.handover is not None else None
    path = "" if left is None else str(left)
    if not path and job.kept is not None:
        path = job.kept.read(state, job.warn)
    if path:
        progress = state.progress
        where = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
        job.session.notify("resumed", **where, path=path)


def _hand_over(job: Leaving, state: Carried, handover: Handover, *, alone: bool) -> None:
    """Leave the state for those who come, unless it is certain that others hold it."""
    if not (alone or job.rank == 0):
        return
    try:
        path = handover.write(state)
    except Exception as error:  # noqa: BLE001  a full disk is a RuntimeError of torch's; a value may not be picklable
        if alone:
            why = one_line(error.__context__ or error)
            job.warn(f"the state after step {state.step} leaves with its last worker: {why}; give --checkpoint_dir")
        return
    log.info("left the state after step %d in %s", state.step, path)


def _keep(job: Leaving, state: Carried) -> None:
    """Leave the state where the job that is to go on from here looks, and where pods that come do."""
    if job.kept is None or state.step == 0:
        return
    if state.cannot_be_kept:
        job.warn(f"nothing is kept of step {state.step}: {state.cannot_be_kept}")
        return
    began = time.monotonic()
    try:
        path = job.kept.write(state)
    except Exception as error:  # noqa: BLE001  as of `_hand_over`
        cause = str(error) if isinstance(error, UserError) else one_line(error.__context__ or error)
        why = f"{cause}; --checkpoint_dir names another place"
        job.session.notify("checkpoint_failed", step=state.step, reason=why)
        return
    seconds = time.monotonic() - began
    job.session.notify("checkpoint", step=state.step, path=path, seconds=seconds, held=seconds)
