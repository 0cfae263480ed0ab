"""The training state of a worker that leaves when perhaps nobody else holds it: a file beside the job's own.

The next world whose members have no state goes on from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Protocol

PATTERN = "handover-*"


class State(Protocol):
    """What is written and read; see `elasticdl.elastic.training.state.TrainingState`."""

    @property
    def step(self) -> int: ...

    def write(self, file: IO[bytes]) -> None: ...

    def read(self, file: IO[bytes]) -> None: ...


class Handover:
    """In a folder that all workers of the job see, if there is one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, state: State) -> Path:
        """Raises:
        OSError: it could not be written; what was there before is untouched.
        """
        path = self._folder / f"handover-{state.step:010d}"
        scratch = self._folder / f".{path.name}.{os.getpid()}"
        try:
            with scratch.open("wb") as file:
                state.write(file)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        self.remove(but=path)
        return path

    def read(self, state: State) -> Path | None:
        """Load what was written last, unless the state is further already."""
        newest = max(self._folder.glob(PATTERN), default=None)
        if newest is None or int(newest.name.rpartition("-")[2]) <= state.step:
            return None
        with newest.open("rb") as file:
            state.read(file)
        return newest

    def remove(self, but: Path | None = None) -> None:
        """It is not needed any more."""
        for path in self._folder.glob(PATTERN):
            if path != but:
                path.unlink(missing_ok=True)
