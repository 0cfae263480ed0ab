"""SIGTERM takes a worker out of its job between two steps. A handler of the script's own is called, too."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.link.session import Session

log = logging.getLogger(__name__)


class Sigterm:
    """Of one process. What is not its main thread can set no handler, and does without."""

    def __init__(self, session: Session) -> None:
        self.came = False
        self._session = session
        self._is_inside = False  # the script's handler, which may call what stood before it
        self._pid = os.getpid()
        self._scripts: Callable[[int, FrameType | None], object] | None = None  # that stood where ours stands

    def listen(self) -> None:
        """From now on; to be called again where a script may have set its own handler since."""
        if threading.current_thread() is not threading.main_thread():
            return
        present = signal.getsignal(signal.SIGTERM)
        if present != self._handle:
            self._scripts = present if callable(present) else None
            signal.signal(signal.SIGTERM, self._handle)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, and then no longer."""
        in_main = threading.current_thread() is threading.main_thread()
        before = in_main and signal.getsignal(signal.SIGTERM)
        self.listen()
        try:
            yield
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork of the script's, which multiprocessing ends so
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._is_inside:
            return
        self.came = True
        self._session.post(p.Terminated("told to leave (SIGTERM)"))
        if self._scripts is None:
            return
        self._is_inside = True
        try:
            self._scripts(number, frame)
        except SystemExit:  # in the middle of a step, which the others would have to make again
            log.info("the script's handler of SIGTERM ends the process: it ends after this step")
        finally:
            self._is_inside = False
