"""Writing checkpoints while training goes on, and what becomes of those that can't be written."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

from elasticdl.common.reason import one_line
from elasticdl.elastic.session.session import Session
from elasticdl.worker.checkpoint import CheckpointStore
from elasticdl.worker.learner import Dump

log = logging.getLogger(__name__)

Copy = Callable[[], Dump]  # copies the state as it is now; what it returns writes the copy


class CheckpointWriter:
    """At most one checkpoint is being written at a time, in a thread. A failure costs that checkpoint only."""

    def __init__(self, store: CheckpointStore, session: Session) -> None:
        self._store = store
        self._session = session
        self._thread: threading.Thread | None = None
        self._under_way = 0  # step
        self.written = 0  # step of the newest one that is whole

    def begin(self, step: int, copy: Copy) -> bool:
        """Copy the state and write the copy in the background. False: left out, as the last one is not done."""
        if step in (self.written, self._under_way):
            return True  # training has come back to this step after a change of workers
        if self._thread is not None and self._thread.is_alive():
            log.warning("checkpoint of step %d left out: that of step %d is still being written", step, self._under_way)
            return False
        self._under_way = step
        work = functools.partial(self._write, step, copy())
        self._thread = threading.Thread(target=work, name="elasticdl-checkpoint", daemon=True)
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
            self.begin(step, copy)
            self.wait(deadline, tick)

    def _write(self, step: int, dump: Dump) -> None:
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
        self._session.notify("checkpoint", step=step, path=path, seconds=seconds)
