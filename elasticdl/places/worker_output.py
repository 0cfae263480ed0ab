"""Where a worker's output goes: into files, or through to this process's own stdout and stderr; and what it has printed last."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

READ_BYTES = 1 << 16
# So much of what a worker prints may be about its end: a dump of its stacks, and lines after it.
LAST_BYTES = 80 << 10
# For what is still in the pipes of a worker that has ended; a process that has left its group may keep them open.
DRAIN_SECONDS = 1.0


class InFile:
    """Of one worker."""

    def __init__(self, log: Path, out: Path | None = None) -> None:
        """``out``: takes what it prints on stdout, if that is another."""
        self._log, self._out = log, out or log

    @contextmanager
    def printing(self) -> Iterator[tuple[int, int]]:
        """Entered once, while the worker is given the descriptors for its stdout and stderr."""
        with self._log.open("ab") as log, self._out.open("ab") as out:
            yield out.fileno(), log.fileno()

    def all(self) -> str:
        """As much of what it has printed as may be about its end; empty if it can't be read."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


class PassedOn:
    """As `InFile`, to this process's own stdout and stderr: by a thread for each of the two, as these may be slow."""

    def __init__(self) -> None:
        self._last = bytearray()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def printing(self) -> Iterator[tuple[int, int]]:
        theirs = []
        for target in (1, 2):
            ours, end = os.pipe()
            theirs.append(end)
            thread = threading.Thread(target=self._pass_on, args=(ours, target), daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            yield theirs[0], theirs[1]
        finally:
            for end in theirs:
                os.close(end)

    def all(self) -> str:
        """Of a worker that has ended: waits a short time for what is under way."""
        for thread in self._threads:
            thread.join(DRAIN_SECONDS)
        with self._lock:
            return self._last.decode(errors="replace")

    def _pass_on(self, ours: int, target: int) -> None:
        with open(ours, "rb", buffering=0) as pipe:
            while chunk := pipe.read(READ_BYTES):
                with self._lock:
                    self._last += chunk
                    del self._last[:-LAST_BYTES]
                with contextlib.suppress(OSError):  # nobody reads it any more
                    _write(target, chunk)


Output: TypeAlias = InFile | PassedOn


def _write(target: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(target, chunk) :]
