"""Files that are there whole or not at all, in a folder of this machine or on any file system that fsspec knows.

Each is written under another name and then renamed. What is in it is for others to know; here it is something that writes itself to a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line


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

    def write(self, name: str, dump: Callable[[IO[bytes]], object], *, durably: bool = True) -> None:
        """``durably``: so that it outlives a loss of power.

        Raises:
            Exception: whatever the file system raises; what was there before is untouched and nothing is left over.
        """
        scratch = self._at(f".{name}.{self._writer}")
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
    except Exception as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
