"""Where states are kept: a folder on this machine, or any file system that fsspec knows.

A file is there whole or not at all: it is written under another name and then renamed. What is in it is for others to know; here it is
something that writes itself to a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.reason import one_line

log = logging.getLogger(__name__)

Content = TypeVar("Content")

STEM = "checkpoint"
SUFFIXES = {".pt": "PyTorch", ".npz": "Keras"}  # of checkpoints, and whose they are


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint; ``path`` as a person would write it."""

    step: int
    path: str


class CheckpointStore:
    """Checkpoints of one job, by step. Several workers may use the same place; at most one writes a step."""

    def __init__(self, url: str, *, keep: int, writer: str, suffix: str = ".pt", stem: str = STEM) -> None:
        """``keep``: newest ones that stay, 0 for all. ``writer`` tells this worker's unfinished files from others'.
        ``suffix``: of the framework whose checkpoints they are. ``stem``: what their names begin with.
        """
        self._files = WholeFiles("--checkpoint_dir", url, writer)
        self._url = url.rstrip("/")
        self._keep = keep
        self._suffix = suffix
        self._stem = stem
        suffixes = "|".join(map(re.escape, SUFFIXES if suffix in SUFFIXES else [suffix]))
        self._whole = re.compile(rf"{stem}-(\d{{10,}})({suffixes})")
        self._scratch = re.compile(rf"\.{stem}-(\d{{10,}})(?:{suffixes})\..*")

    def path(self, step: int) -> str:
        return f"{self._url}/{self._name(step)}"

    def newest_first(self) -> list[Checkpoint]:
        """The newest first.

        Raises:
            UserError: the folder can't be read, or they are of another framework.
        """
        try:
            names = self._files.names()
        except OSError as error:
            raise UserError(f"{self._url} can't be read: {one_line(error)}") from error
        found = [match for name in names if (match := self._whole.fullmatch(name))]
        if foreign := [match for match in found if match[2] != self._suffix]:
            raise UserError(
                f"--checkpoint_dir {self._url} holds checkpoints of {SUFFIXES[foreign[0][2]]} ({foreign[0][0]}), and this "
                f"is a training with {SUFFIXES[self._suffix]}: give another folder"
            )
        steps = [int(match[1]) for match in found]
        return [Checkpoint(step, self.path(step)) for step in sorted(steps, reverse=True)]

    def read(self, step: int, load: Callable[[IO[bytes]], Content]) -> Content:
        with self._files.open(self._name(step)) as file:
            return load(file)

    def read_newest(
        self, load: Callable[[IO[bytes]], Content], remedy: str, step: int = 0
    ) -> tuple[Checkpoint, Content] | None:
        """The newest that can be read, if there are any. Newer ones are passed over, with a line in the log. ``step``: only that one.

        Raises:
            UserError: not one of them can be read. ``remedy``: what the user can do about it.
        """
        found = [each for each in self.newest_first() if step in (0, each.step)]
        why = ""
        for checkpoint in found:
            try:
                content = self.read(checkpoint.step, load)
            except Exception as error:  # noqa: BLE001 - the unpickler raises anything over a damaged file
                why = one_line(error).partition(". ")[0].rstrip(".")  # torch says much of a damaged file
                log.warning("%s can't be read and is passed over: %s", checkpoint.path, why)
                continue
            return checkpoint, content
        if found:
            older = f", nor can the {len(found) - 1} older ones" * (len(found) > 1)
            raise UserError(f"{found[0].path} can't be read{older}: {why}; {remedy}")
        return None

    def write(self, step: int, dump: Callable[[IO[bytes]], object]) -> None:
        """Write a checkpoint, then delete those that are too many.

        Raises:
            Exception: whatever the file system raises; what was there before is untouched and nothing is left over.
        """
        self._files.make_folder()
        self._files.write(self._name(step), dump)
        self._tidy(step)

    def remove(self, *, before: int | None = None, but: int | None = None) -> None:
        """All of them, or those of steps ``before`` one, except for one step: nobody goes on from them any more."""
        for name in self._files.names():
            step = int(match[1]) if (match := self._whole.fullmatch(name)) else but
            if step != but and (before is None or (step is not None and step < before)):
                self._files.remove(name)

    def _name(self, step: int) -> str:
        return f"{self._stem}-{step:010d}{self._suffix}"

    def _tidy(self, step: int) -> None:
        """Delete what the new checkpoint makes superfluous: the oldest, and what dead writers left unfinished."""
        names = self._files.names()
        stale = [name for name in names if (match := self._scratch.fullmatch(name)) and int(match[1]) < step]
        whole = sorted((int(match[1]), name) for name in names if (match := self._whole.fullmatch(name)))
        surplus = [name for _, name in whole[: -self._keep]] if self._keep else []
        for name in stale + surplus:
            self._files.remove(name)


class WholeFiles:
    """Of one folder, by name. Several workers may use it; ``writer`` tells the unfinished files of one from those of the others."""

    def __init__(self, option: str, url: str, writer: str) -> None:
        """
        Raises:
            UserError: no file system is known for the URL. ``option``: that gave it.
        """
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{option} {url}: {one_line(error)}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._writer = writer

    def make_folder(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        # Others change the folder as well: what was listed before is no longer true.
        self._fs.invalidate_cache()
        try:
            return [path.rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def open(self, name: str) -> IO[bytes]:
        opened: IO[bytes] = self._fs.open(self._at(name), "rb")
        return opened

    def write(
        self,
        name: str,
        dump: Callable[[IO[bytes]], object],
        *,
        durably: bool = True,
        aside: WholeFiles | None = None,
    ) -> None:
        """``durably``: so that it outlives a loss of power. ``aside``: another folder of the same file system, for the unfinished file.

        Raises:
            Exception: whatever the file system raises; what was there before is untouched and nothing is left over.
        """
        scratch = (aside or self)._at(f".{name}.{self._writer}")
        try:
            with self._fs.open(scratch, "wb") as file:
                _dump(dump, file)
                if self._is_local and durably:
                    file.flush()
                    os.fsync(file.fileno())
            self._rename(scratch, self._at(name), durably)
        except BaseException:
            self._remove(scratch)
            raise

    def remove(self, name: str) -> None:
        self._remove(self._at(name))

    def remove_all(self) -> None:
        """The folder, with all that is in it."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._root, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _rename(self, scratch: str, path: str, durably: bool) -> None:
        if not self._is_local:
            self._fs.mv(scratch, path)
            return
        os.replace(scratch, path)
        if durably:
            folder = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):  # it was never made, or the file system is what failed
            self._fs.rm_file(path)


def _dump(dump: Callable[[IO[bytes]], object], file: IO[bytes]) -> None:
    """Where torch's writer tells of a position that it did not expect, the reason was a full disk: say that."""
    try:
        dump(file)
    except ElasticDLError:
        raise
    except Exception as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
