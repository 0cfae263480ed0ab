"""Files that a worker leaves: a record of the samples that it consumed, and its state when it is the last to hold it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.progress import Progress, StepPlan
from elasticdl.elastic.core.world import World
from elasticdl.elastic.training.carried import Carried

HANDED_OVER = "handover-*"


class SampleRecord:
    """The samples that a worker really consumed, for proving that each was used exactly once per epoch; a file per worker.

    Two kinds of JSON lines: ``begin`` before a step's gradients are reduced (so that it is there even if the worker is
    killed right after contributing), ``commit`` after the step has been applied. A step counts with the indices begun by
    all members in the newest world that committed it; what was begun and never committed is a torn step.
    """

    def __init__(self, folder: Path, worker_id: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"worker-{worker_id}.jsonl").open("a", buffering=1)
        except OSError as error:
            raise UserError(f"--sample_record {folder}: {error.strerror}") from error

    def begin(self, world: World, plan: StepPlan) -> None:
        mine = (index for each in plan.micro_batches for index in each.indices[: each.samples])
        indices = [int(index) for index in mine if isinstance(index, Integral)]
        self._write({"begin": plan.step, "world": world.version, "epoch": plan.epoch, "indices": indices})

    def commit(self, world: World, progress: Progress) -> None:
        self._write({"commit": progress.step, "world": world.version})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry) + "\n")


class Handover:
    """The state of a worker that leaves when perhaps nobody else holds it: a file beside the job's own, in a folder that
    all workers see, if there is one. The next world whose members have no state goes on from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, state: Carried) -> Path:
        """Raises OSError if it could not be written; what was there before is untouched."""
        path = self._folder / f"handover-{state.step:010d}"
        with aside(path) as scratch, scratch.open("wb") as file:
            state.write(file)
            file.flush()
            os.fsync(file.fileno())
        self.remove(but=path)
        return path

    def read(self, state: Carried) -> Path | None:
        """Load what was written last, unless the state is further already."""
        newest = max(self._folder.glob(HANDED_OVER), default=None)
        if newest is None or int(newest.name.rpartition("-")[2]) <= state.step:
            return None
        with newest.open("rb") as file:
            state.read(file)
        return newest

    def remove(self, but: Path | None = None) -> None:
        """It is not needed any more."""
        for path in self._folder.glob(HANDED_OVER):
            if path != but:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path beside the given one, of a file or a folder, which takes its place if all goes well."""
    scratch = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield scratch
        if path.is_dir():
            shutil.rmtree(path)
        scratch.replace(path)
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch)
        scratch.unlink(missing_ok=True)
