"""The state of a training that was stopped, kept for the next job that is to go on from it.

It is kept where all workers see it: in ``--checkpoint_dir``, or in the job's own folder, whose kept state the next job of that
name is given; pods have no such folder. It goes when a training that went on from it is complete.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.training.carried import Carried
from elasticdl.job.jobdir import STOPPED_STEM, STOPPED_SUFFIX, kept_states
from elasticdl.job.spec import JobSpec

if TYPE_CHECKING:
    from elasticdl.elastic.training.checkpoint_store import Checkpoint, CheckpointStore

FORMAT = 1
KEPT = "kept"  # in the file, beside the state: what it is of
REMEDY = "give --no_resume to begin anew"


class KeptState:
    """``place``: a folder, or a URL; empty if there is none. ``resume``: whether training may go on from what is there."""

    def __init__(self, place: str, *, resume: bool = True) -> None:
        self.place = place
        self._resume = resume

    @classmethod
    def of(cls, spec: JobSpec, folder: Path) -> Self:
        """``folder``: in which the job's specification is. In a pod that is a read-only mount of the pod's own."""
        return cls(spec.checkpoint_dir or ("" if spec.image else str(folder)), resume=spec.resume)

    def write(self, state: Carried) -> str:
        """Keep this state, and no earlier one, or none of a training that this one has not gone on from; returns where.

        Raises:
            Exception: whatever may go wrong; what was there before is untouched.
        """
        if not self.place:
            raise UserError("pods share no folder")
        store = self._store()
        about = {"format": FORMAT, "by": type(state).__name__, "origin": state.origin}
        store.write(state.step, lambda file: state.write(file, **{KEPT: about}))
        # Of a world that broke several write, and one may be a step further than the others.
        store.remove(before=state.step if self._resume else None, but=state.step)
        return store.path(state.step)

    def read(self, state: Carried, tell: Callable[[str], None]) -> str:
        """Load it, if there is one to go on from; returns its path, empty if there is none.

        ``tell``: takes why one that is there is not loaded.

        Raises:
            UserError: it can't be read, or is of another training.
        """
        found = self._newest() if self._resume else None
        if found is None:
            return ""
        if state.step and (state.begins_as_told or found.step <= state.step):
            tell(
                f"the script goes on from step {state.step} by a checkpoint of its own: {found.path}, which was kept of step "
                f"{found.step}, is left alone"
            )
            return ""
        loaded = self._unpacked(found, state)
        about = loaded.pop(KEPT)
        it = f"{found.path}, kept of step {found.step},"
        if about["by"] != type(state).__name__:
            raise UserError(f"{it} is of a script that trains in another way: {REMEDY}")
        if problem := state.misfit(loaded):
            raise UserError(f"{it} is of another training: {problem}; {REMEDY}")
        require_origin(it, about["origin"], state.origin, loaded["progress"]["position"])
        try:
            state.load(loaded)
        except Exception as error:  # the script's own objects may raise anything
            raise UserError(f"{it} does not fit: {one_line(error)}; {REMEDY}") from error
        state.resumed = (it, about["origin"])
        return found.path

    def remove(self) -> None:
        """The training is complete."""
        if self._is_there():
            self._store().remove()

    # -- details --

    def _store(self) -> CheckpointStore:
        from elasticdl.elastic.training.checkpoint_store import CheckpointStore  # which takes a moment to import

        writer = f"{socket.gethostname()}-{os.getpid()}"
        return CheckpointStore(self.place, keep=0, writer=writer, suffix=STOPPED_SUFFIX, stem=STOPPED_STEM)

    def _is_there(self) -> bool:
        """Perhaps: only of a folder is it known without a store."""
        return "://" in self.place or bool(self.place and kept_states(Path(self.place)))

    def _newest(self) -> Checkpoint | None:
        if not self._is_there():
            return None
        try:
            return next(iter(self._store().newest_first()), None)
        except OSError as error:
            raise UserError(f"{self.place} can't be read: {one_line(error)}") from error

    def _unpacked(self, found: Checkpoint, state: Carried) -> dict[str, Any]:
        try:
            loaded = self._store().read(found.step, state.unpack)
            if not isinstance(loaded, dict) or loaded.get(KEPT, {}).get("format") != FORMAT:
                raise ValueError(f"not a state of format {FORMAT}")
        except Exception as error:  # the unpickler raises anything over a damaged file
            raise UserError(
                f"{found.path}, kept of step {found.step}, can't be read: {_first_sentence(error)}; {REMEDY}"
            ) from error
        return loaded


def _first_sentence(error: Exception) -> str:
    """Torch says much of a damaged file."""
    return one_line(error).partition(". ")[0].rstrip(".")


def require_origin(it: str, there: Mapping[str, Any], here: Mapping[str, Any], position: int) -> None:
    """That a position within an epoch means here what it meant there.

    Raises:
        UserError: it does not, as the data have changed.
    """
    if position in (0, there.get("samples")):
        return
    for name in (each for each in there if each in here):
        if there[name] != here[name]:
            raise UserError(
                f"{it} stands within an epoch of other data: {name} was {there[name]} and is {here[name]}; {REMEDY}"
            )


def difference(there: Any, here: Any) -> str:
    """The first difference between two models by name, in words; empty if there is none, or nothing has a name."""
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        return ""
    for name in (*here, *there):
        if name not in there:
            return f"it has no {name}"
        if name not in here:
            return f"it has {name}, which this model has not"
    for name, value in here.items():
        was, now = (tuple(v.shape) if hasattr(v, "shape") else None for v in (there[name], value))
        if was != now:
            return f"{name} has shape {was} there and {now} here"
    return ""
