"""Where checkpoints are kept: a folder on this machine, or any file system that fsspec knows.

A checkpoint is there whole or not at all: it is written under another name and then renamed. What is in it is the
framework's business; here it is something that writes itself to a file.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.session.session import Session

log = logging.getLogger(__name__)

Dump = Callable[[IO[bytes]], object]  # writes a state that was copied before
Copy = Callable[[], Dump]  # copies the state as it is now; what it returns writes the copy
Content = TypeVar("Content")

CHECKPOINT_THREAD = "elasticdl-checkpoint"
SUFFIXES = {".pt": "PyTorch", ".npz": "Keras"}  # and whose checkpoints they are

_NAME = re.compile(r"checkpoint-(\d{10,})(\.pt|\.npz)")
_SCRATCH = re.compile(r"\.checkpoint-(\d{10,})(?:\.pt|\.npz)\..*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint; ``path`` as a person would write it."""

    step: int
    path: str


class CheckpointStore:
    """Checkpoints of one job, by step. Several workers may use the same place; at most one writes a step."""

    def __init__(self, url: str, *, keep: int, writer: str, suffix: str = ".pt") -> None:
        """``keep``: newest ones that stay, 0 for all. ``writer`` tells this worker's unfinished files from others'.
        ``suffix``: of the framework whose checkpoints they are.
        """
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"--checkpoint_dir {url}: {one_line(error)}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._url = url.rstrip("/")
        self._keep = keep
        self._writer = writer
        self._suffix = suffix

    def path(self, step: int) -> str:
        return f"{self._url}/{self._name(step)}"

    def newest_first(self) -> list[Checkpoint]:
        """The newest first.

        Raises:
            OSError: the folder can't be read.
            UserError: they are of another framework.
        """
        found = [match for name in self._names() if (match := _NAME.fullmatch(name))]
        if foreign := [match for match in found if match[2] != self._suffix]:
            raise UserError(
                f"--checkpoint_dir {self._url} holds checkpoints of {SUFFIXES[foreign[0][2]]} ({foreign[0][0]}), and this "
                f"is a training with {SUFFIXES[self._suffix]}: give another folder"
            )
        steps = [int(match[1]) for match in found]
        return [Checkpoint(step, self.path(step)) for step in sorted(steps, reverse=True)]

    def read(self, step: int, load: Callable[[IO[bytes]], Content]) -> Content:
        with self._fs.open(self._at(self._name(step)), "rb") as file:
            return load(file)

    def write(self, step: int, dump: Callable[[IO[bytes]], object]) -> None:
        """Write a checkpoint, then delete those that are too many.

        Raises:
            Exception: whatever the file system raises; what was there before is untouched and nothing is left over.
        """
        self._fs.makedirs(self._root, exist_ok=True)
        scratch = self._at(f".{self._name(step)}.{self._writer}")
        try:
            with self._fs.open(scratch, "wb") as file:
                _dump(dump, file)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
            self._rename(scratch, self._at(self._name(step)))
        except BaseException:
            self._remove(scratch)
            raise
        self._tidy(step)

    def set_aside(self, step: int) -> None:
        """Rename a checkpoint that can't be read: it is neither listed any more nor counted among those to keep.

        Raises:
            OSError: it could not be renamed.
        """
        path = self._at(self._name(step))
        self._fs.mv(path, f"{path}.unreadable")

    def _name(self, step: int) -> str:
        return f"checkpoint-{step:010d}{self._suffix}"

    def _names(self) -> list[str]:
        # Others change the folder as well: what was listed before is no longer true.
        self._fs.invalidate_cache()
        try:
            return [path.rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _rename(self, scratch: str, path: str) -> None:
        if self._is_local:
            os.replace(scratch, path)
            folder = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        else:
            self._fs.mv(scratch, path)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):  # it was never made, or the file system is what failed
            self._fs.rm_file(path)

    def _tidy(self, step: int) -> None:
        """Delete what the new checkpoint makes superfluous: the oldest, and what dead writers left unfinished."""
        names = self._names()
        stale = [name for name in names if (match := _SCRATCH.fullmatch(name)) and int(match[1]) < step]
        whole = sorted((int(match[1]), name) for name in names if (match := _NAME.fullmatch(name)))
        surplus = [name for _, name in whole[: -self._keep]] if self._keep else []
        for name in stale + surplus:
            self._remove(self._at(name))


def _dump(dump: Callable[[IO[bytes]], object], file: IO[bytes]) -> None:
    """Where torch's writer tells of a position that it did not expect, the reason was a full disk: say that."""
    try:
        dump(file)
    except Exception as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


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
