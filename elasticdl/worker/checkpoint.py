"""Where checkpoints are kept: a folder on this machine, or any file system that fsspec knows.

A checkpoint is there whole or not at all: it is written under another name and then renamed. What is in it is the
framework's business; here it is something that writes itself to a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.common.spec import JobSpec

Content = TypeVar("Content")

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

        Raises:
            UserError: there is no such kind of file system, or what it needs is not installed.
        """
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"--checkpoint_dir {url}: {one_line(error)}") from error
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
                self._settle(file)
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

    def _settle(self, file: Any) -> None:
        if isinstance(self._fs, LocalFileSystem):
            file.flush()
            os.fsync(file.fileno())

    def _rename(self, scratch: str, path: str) -> None:
        if isinstance(self._fs, LocalFileSystem):
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
        whole = sorted((name for name in names if _NAME.fullmatch(name)), key=_step)
        surplus = whole[: -self._keep] if self._keep else []
        for name in stale + surplus:
            self._remove(self._at(name))


class _Witness:
    """Passes everything on to a file, and keeps the error of a write that failed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _dump(dump: Callable[[IO[bytes]], object], file: Any) -> None:
    """Where torch's writer tells of a position that it did not expect, the reason was a full disk: say that."""
    witness = _Witness(file)
    try:
        dump(cast(IO[bytes], witness))
    except Exception as error:
        if witness.error is not None:
            raise witness.error from error
        raise


def open_store(spec: JobSpec, suffix: str) -> CheckpointStore | None:
    """The job's store; None without ``--checkpoint_dir``.

    Raises:
        UserError: the place is unusable.
    """
    if not spec.checkpoint_dir:
        return None
    writer = f"{socket.gethostname()}-{os.getpid()}"
    return CheckpointStore(spec.checkpoint_dir, keep=spec.keep_checkpoint_max, writer=writer, suffix=suffix)


def _step(name: str) -> int:
    return int(name.removeprefix("checkpoint-").partition(".")[0])
