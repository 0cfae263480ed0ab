"""The state of a training that was stopped, kept for the next job that is to go on from it.

It is kept where all workers see it: in ``--checkpoint_dir``, or in the job's own folder, whose kept state the next job of that
name is given; pods have no such folder. It goes when a training that went on from it is complete. The last worker that has to leave
while its job goes on keeps it, too, and the next worker goes on from it.

And a worker's record of the samples that it consumed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.port import Inside
from elasticdl.elastic.core.plan import Progress, StepPlan
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.training_step import Vote
from elasticdl.job.jobdir import STOPPED_STEM, STOPPED_SUFFIX, kept_states
from elasticdl.job.spec import TRAIN, JobSpec

if TYPE_CHECKING:
    from elasticdl.elastic.training.checkpoint_store import Checkpoint, CheckpointStore

# What a job needs of the training state that it brings from world to world.


class Carried(Protocol):
    """See `elasticdl.elastic.training.state.TrainingState`."""

    resumed: tuple[str, Mapping[str, Any]] | None
    cannot_be_kept: str

    @property
    def has_state(self) -> bool: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def step(self) -> int: ...

    @property
    def origin(self) -> Mapping[str, Any]: ...

    def bind_state(self) -> None: ...

    def require_jobs_facts(self) -> None: ...

    def sync(self, world: World) -> None: ...

    def cast_end_vote(self) -> Vote: ...

    def write(self, file: IO[bytes], **more: Any) -> None: ...

    def unpack(self, file: IO[bytes]) -> Any: ...

    def load(self, unpacked: dict[str, Any]) -> None: ...


FORMAT = 4
KEPT = "kept"  # in the file, beside the state: what it is of
REMEDY = "give --no_resume to begin anew"


class KeptState:
    """``place``: a folder, or a URL; empty if there is none. ``resume``: whether training may go on from what is there.

    ``within``: where what this job has kept itself is as well, for its own workers that come later, if it may not go on from all that
    is in its place.
    """

    def __init__(
        self, place: str, *, resume: bool = True, within: Self | None = None, inside: Inside | None = None
    ) -> None:
        """``inside``: each process of a worker keeps what it has."""
        self.place = place
        self._inside = inside or Inside()
        self._resume = resume
        self._within = within

    @classmethod
    def of(cls, spec: JobSpec, folder: Path, inside: Inside | None = None) -> Self:
        """``folder``: in which the job's specification is. In a pod that is a read-only mount of the pod's own."""
        own = (
            "" if spec.image else str(folder)
        )  # what is in there is of this job, or was put there as it is to go on from that
        place = spec.checkpoint_dir if spec.task == TRAIN else spec.parts
        resume = spec.resume or not place
        within = cls(own, inside=inside) if own and not resume else None
        return cls(place or own, resume=resume, within=within, inside=inside)

    def write(self, state: Carried) -> str:
        """Keep this state, and no earlier one, or none of a training that this one has not gone on from; returns where.

        Raises:
            Exception: whatever may go wrong; what was there before is untouched.
        """
        if not self.place:
            raise UserError("pods share no folder")
        if self._within is not None:
            self._within.write(state)
        store = self._store()
        about = {"format": FORMAT, "by": type(state).__name__, "origin": state.origin}
        store.write(state.step, lambda file: state.write(file, **{KEPT: about}))
        # Of a world that broke several write, and one may be a step further than the others.
        store.remove(before=state.step if self._resume else None, but=state.step)
        if not self._resume:
            self._remove_others()
        return store.path(state.step)

    def read(self, state: Carried, tell: Callable[[str], None]) -> str:
        """Load it, if there is one to go on from; returns its path, empty if there is none.

        ``tell``: takes why one that is there is not loaded.

        Raises:
            UserError: it can't be read, or is of another training.
        """
        if self._within is not None:
            return self._within.read(state, tell)
        if not self._resume or not self._inside.any(self._is_there()):
            return ""
        store = self._store()
        readable = store.read_newest(functools.partial(_unpack, state), REMEDY)
        self._require_alike(readable[0].step if readable else 0)
        if readable is None or not self._is_further(readable[0], state, tell):
            return ""
        found, loaded = readable
        about = loaded.pop(KEPT)
        it = f"{found.path}, kept of step {found.step},"
        if about["by"] != type(state).__name__:
            raise UserError(f"{it} is of a script that trains in another way: {REMEDY}")
        load_saved(state, it, loaded, about["origin"], state.load, REMEDY)
        state.resumed = (it, about["origin"])
        return found.path

    @staticmethod
    def _is_further(found: Checkpoint, state: Carried, tell: Callable[[str], None]) -> bool:
        """Than the script's own checkpoint, if it goes on from one."""
        if state.step and found.step <= state.step:
            tell(
                f"the script goes on from step {state.step} by a checkpoint of its own: {found.path}, which was kept of step "
                f"{found.step}, is left alone"
            )
            return False
        return True

    def remove(self) -> None:
        """The training is complete."""
        if self._within is not None:
            self._within.remove()
        if self._is_there():
            self._store().remove()
        self._remove_others()

    # -- details --

    def _remove_others(self) -> None:
        """What workers of another number of processes have kept in the folder."""
        ours = f"of{self._inside.size}-" if self._inside.size > 1 else f"{STOPPED_STEM}-"
        for path in kept_states(Path(self.place)) if self.place and "://" not in self.place else ():
            if ours not in path.name:
                path.unlink(missing_ok=True)

    def _store(self) -> CheckpointStore:
        from elasticdl.elastic.training.checkpoint_store import CheckpointStore  # which takes a moment to import

        writer = f"{socket.gethostname()}-{os.getpid()}"
        of_one = f".{self._inside.rank}of{self._inside.size}" if self._inside.size > 1 else ""
        stem = f"{STOPPED_STEM}{of_one}"
        return CheckpointStore(self.place, keep=0, writer=writer, suffix=STOPPED_SUFFIX, stem=stem)

    def _require_alike(self, step: int) -> None:
        """What is kept of each process of a worker is of one step. ``step``: of this one's, 0 if nothing is.

        Raises:
            UserError: it is not, or is of workers of another number of processes.
        """
        is_others = not step and "://" not in self.place and bool(kept_states(Path(self.place)))
        steps = self._inside.sum([step, step * step, is_others])
        if self._inside.size * steps[1] != steps[0] ** 2 or steps[2]:
            raise UserError(
                f"what is kept in {self.place} is not of workers of {self._inside.size} processes, or is not whole: give the --processes_per_worker of then; {REMEDY}"
            )

    def _is_there(self) -> bool:
        """Perhaps: only of a folder is it known without a store."""
        return "://" in self.place or bool(self.place and kept_states(Path(self.place)))


def _unpack(state: Carried, file: IO[bytes]) -> dict[str, Any]:
    loaded = state.unpack(file)
    if not isinstance(loaded, dict) or loaded.get(KEPT, {}).get("format") != FORMAT:
        raise ValueError(f"not a state of format {FORMAT}")
    return loaded


def load_saved(
    state: Carried,
    it: str,
    saved: dict[str, Any],
    origin: Mapping[str, Any],
    load: Callable[[dict[str, Any]], object],
    remedy: str,
) -> None:
    """Go on from what was saved of a training. ``it``: the file. ``origin``: of the training that wrote it.

    Raises:
        UserError: it is of another one.
    """
    require_origin(it, origin, state.origin, saved["progress"]["position"], remedy)
    try:
        load(saved)
    except Exception as error:  # the script's own objects may raise anything
        why = str(error) if isinstance(error, UserError) else one_line(error)
        raise UserError(f"{it} does not fit: {why}; {remedy}") from error


def require_origin(
    it: str, there: Mapping[str, Any], here: Mapping[str, Any], position: int, remedy: str = REMEDY
) -> None:
    """That a position within an epoch means here what it meant there.

    Raises:
        UserError: it does not, as the data or their order have changed.
    """
    if position in (0, there.get("samples")):
        return
    for name in (each for each in there if each in here):
        if there[name] != here[name]:
            raise UserError(
                f"{it} stands within an epoch of other data: {name} was {there[name]} and is {here[name]}; {remedy}"
            )


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
