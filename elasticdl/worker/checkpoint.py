"""Writes checkpoints beside the training."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import IO

from elasticdl.common.reason import one_line
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.training.checkpoint_store import CheckpointStore
from elasticdl.job.spec import JobSpec

log = logging.getLogger(__name__)

Dump = Callable[[IO[bytes]], object]  # writes a state that was copied before
Copy = Callable[[], Dump]  # copies the state as it is now; what it returns writes the copy

CHECKPOINT_THREAD = "elasticdl-checkpoint"


def open_store(spec: JobSpec, suffix: str) -> CheckpointStore | None:
    """The job's store; None without ``--checkpoint_dir``. Raises UserError if the place is unusable."""
    if not spec.checkpoint_dir:
        return None
    writer = f"{socket.gethostname()}-{os.getpid()}"
    return CheckpointStore(spec.checkpoint_dir, keep=spec.keep_checkpoint_max, writer=writer, suffix=suffix)


class CheckpointWriter:
    """At most one checkpoint is being written at a time, in a thread. A failure costs that checkpoint only."""

    def __init__(self, store: CheckpointStore, session: Session) -> None:
        self._store = store
        self._session = session
        self._thread: threading.Thread | None = None
        self._under_way = 0  # step
        self.written = 0  # step of the newest one that is whole

    def begin(self, step: int, copy: Copy, *, awaited: bool = False) -> bool:
        """Copy the state and write the copy in the background. False: left out, as the last one is not done.

        ``awaited``: nothing else is done meanwhile, so that writing holds training up as copying does.
        """
        if step in (self.written, self._under_way):
            return True  # training has come back to this step after a change of workers
        if self._thread is not None and self._thread.is_alive():
            log.warning("checkpoint of step %d left out: that of step %d is still being written", step, self._under_way)
            return False
        self._under_way = step
        began = time.monotonic()
        dump = copy()
        work = functools.partial(self._write, step, dump, time.monotonic() - began, awaited)
        self._thread = threading.Thread(target=work, name=CHECKPOINT_THREAD, daemon=True)
        self._thread.start()
        return True

    def wait(self, deadline: float, tick: Callable[[], None] = lambda: None) -> bool:
        """Until nothing is being written or the (monotonic) deadline has passed; ``tick`` is called each second."""
        while self._thread is not None and self._thread.is_alive():
            left = deadline - time.monotonic()
            if left <= 0:
                log.error("checkpoint of step %d was not finished in time", self._under_way)
                return False
            self._thread.join(timeout=min(left, 1.0))
            tick()
        return True

    def finish(self, step: int, copy: Copy, deadline: float, tick: Callable[[], None] = lambda: None) -> None:
        """See to it that the state of this step, the last, is written; waits for it."""
        if self.wait(deadline, tick) and self.written != step:
            self._under_way = 0  # if it has been tried, that has failed
            self.begin(step, copy, awaited=True)
            self.wait(deadline, tick)

    def _write(self, step: int, dump: Dump, held: float, awaited: bool) -> None:
        path = self._store.path(step)
        began = time.monotonic()
        try:
            self._store.write(step, dump)
        except Exception as error:  # noqa: BLE001 - whatever a storage raises must not end a training
            log.error("checkpoint %s could not be written: %s", path, one_line(error))
            self._session.notify("checkpoint_failed", step=step, path=path, reason=one_line(error))
            return
        self.written = step
        seconds = time.monotonic() - began
        log.info("checkpoint %s written in %.2f s", path, seconds)
        self._session.notify("checkpoint", step=step, path=path, seconds=seconds, held=held + awaited * seconds)
