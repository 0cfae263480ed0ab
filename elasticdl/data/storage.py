"""Files by name, on this machine or behind any fsspec URL: which there are, and pieces of their content."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import IO

import fsspec

from elasticdl.common.errors import ArgumentError, UserError

MOST_OPEN = 64  # files of this machine, per data set and process


def find_files(where: str) -> list[str]:
    """The files that a path names: files, folders, globs and URLs, separated by commas; each part in order of names.

    Names that begin with ``.`` or ``_`` below a folder, or for a glob that does not, are passed over.

    Raises:
        ArgumentError: a part names nothing.
    """
    files = [file for part in where.split(",") if part.strip() for file in _expand(part.strip())]
    if not files:
        raise ArgumentError(f"{where!r} names no files; expected files, folders, globs or URLs, separated by commas")
    return files


def _expand(part: str) -> list[str]:
    try:
        fs, path = fsspec.core.url_to_fs(part)
        if fs.isfile(path):
            return [part]
        if fs.isdir(path):
            found = sorted(name for name in fs.find(path) if _counts(name, path))
        elif _is_glob(part):
            hidden = tuple(sign for sign in "._" if not posixpath.basename(path).startswith(sign))
            names = (name for name in fs.glob(path) if not posixpath.basename(name).startswith(hidden))
            found = sorted(name for name in names if fs.isfile(name))
        else:
            found = []
    except (ImportError, ValueError, OSError) as error:
        raise ArgumentError(f"{part}: can't be listed: {error}") from error
    if not found:
        kind = "no files in this folder" if not _is_glob(part) and fs.isdir(path) else "no such file or folder"
        raise ArgumentError(f"{part}: {kind}; expected files, folders, globs or URLs, separated by commas")
    return [name if "://" not in part else str(fs.unstrip_protocol(name)) for name in found]


def _is_glob(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def _counts(name: str, folder: str) -> bool:
    return not any(part[0] in "._" for part in PurePosixPath(os.path.relpath(name, folder)).parts)


class Storage:
    """Reads pieces of files; for any number of threads, and a copy in another process opens its own.

    Of files on this machine the latest stay open; dropping one from the cache closes it when nobody reads it any more.
    """

    def __init__(self) -> None:
        # A file is closed when the cache, and then the last reader, lets it go.
        self._opened = functools.lru_cache(maxsize=MOST_OPEN)(functools.partial(open, mode="rb", buffering=0))
        self._located = functools.lru_cache(maxsize=None)(fsspec.core.url_to_fs)

    def __reduce__(self) -> tuple[type[Storage], tuple[()]]:
        return Storage, ()

    def size(self, file: str) -> int:
        with _reading(file):
            if "://" not in file:
                return os.stat(file).st_size
            fs, path = self._located(file)
            return int(fs.size(path))

    def read(self, file: str, pieces: Sequence[Sequence[int]]) -> list[bytes]:
        """The pieces of one file, each from an offset to an end."""
        with _reading(file):
            if "://" not in file:
                descriptor = self._opened(file)
                parts = [os.pread(descriptor.fileno(), end - start, start) for start, end in pieces]
            else:
                fs, path = self._located(file)
                parts = fs.cat_ranges([path] * len(pieces), [start for start, _ in pieces], [end for _, end in pieces])
        for (start, end), part in zip(pieces, parts, strict=True):
            if len(part) != end - start:
                raise UserError(
                    f"{file}: has no bytes {start:,} to {end:,} any more; expected the file that training began with"
                )
        return parts

    def chunks(self, file: str, size: int = 1 << 24) -> Iterator[bytes]:
        """The whole content from the beginning, piece by piece."""
        with _reading(file), self.open(file) as content:
            while chunk := content.read(size):
                yield chunk

    def open(self, file: str) -> IO[bytes]:
        """For libraries that read by themselves; the caller closes it."""
        if "://" not in file:
            return open(file, "rb")
        fs, path = self._located(file)
        opened: IO[bytes] = fs.open(path, "rb")
        return opened


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, ValueError) as error:
        raise UserError(f"{file}: can't be read: {getattr(error, 'strerror', None) or error}") from error
