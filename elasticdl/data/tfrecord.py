"""TFRecord files, read by offset.

A record is its length (8 bytes, little endian), a checksum of the length (4), the data, and a checksum of the data (4).
The index is made from the lengths alone. The first length's checksum is compared, which tells other files apart;
those of the data are not, as that would read everything once before training. The lengths of a remote file are read
window by window, and its index is kept on this machine for the next worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import platformdirs
from numpy.typing import NDArray

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.common.errors import UserError
from elasticdl.data.records import PieceFile
from elasticdl.data.storage import Storage
from elasticdl.parsing_threads import parsed_beside_threads

HEADER, FOOTER = 12, 4  # bytes around the data
WINDOW_BYTES = 8 << 20  # as much as is faster to read than to ask for another place
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


def open_tfrecord(name: str, storage: Storage) -> PieceFile:
    """Find all records of a file that is not empty."""
    size = storage.size(name)

    def window_at(start: int) -> bytes:
        return storage.read(name, [(start, min(start + WINDOW_BYTES, size))])[0]

    if "://" in name:
        ends = _kept(storage.version(name), lambda: _find_ends(name, size, window_at))
    else:
        with storage.open(name) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            ends = _find_ends(name, len(mapped), lambda at: mapped)
    starts = np.concatenate([[HEADER], ends[:-1] + (FOOTER + HEADER)]).astype(np.int64)
    return PieceFile(name, storage, np.column_stack([starts, ends]))


def _find_ends(name: str, size: int, window_at: Callable[[int], bytes | mmap.mmap]) -> NDArray[np.int64]:
    """Where the data of each record end. ``window_at``: gives the content from a place on, or some of it."""
    window, begins = window_at(0), 0
    if len(window) < HEADER or masked_crc32c(window[:8]) != _CHECKSUM.unpack_from(window, 8)[0]:
        raise UserError(f"{name}: not a TFRecord file: its first 12 bytes are no length with its checksum")
    ends: list[int] = []
    offset = 0
    length_at = _LENGTH.unpack_from
    while offset + HEADER <= size:
        if offset + HEADER > begins + len(window):
            window, begins = window_at(offset), offset
        end: int = offset + HEADER + length_at(window, offset - begins)[0]
        if end + FOOTER > size:
            break
        ends.append(end)
        offset = end + FOOTER
    if offset != size:
        raise UserError(
            f"{name}: cut short or damaged: the record at byte {offset:,} (number {len(ends):,}) goes beyond the end "
            f"of the file, {size:,}; expected a whole TFRecord file: copy or write it again"
        )
    return np.array(ends, np.int64)


def _kept(version: str, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """What ``make`` returns, or what it returned before for this version of a file; not kept if the version is empty.

    It is on this machine, so that a worker that starts later need not read the file for it again.
    """
    if not version:
        return make()
    folder = platformdirs.user_cache_path("elasticdl") / "indexes"
    path = folder / f"{hashlib.sha256(version.encode()).hexdigest()}.npy"
    # Not there, or written by a process that died: it is made anew.
    with contextlib.suppress(OSError, ValueError, EOFError), path.open("rb") as file:
        return parsed_beside_threads(partial(_read, file))
    made = make()
    with contextlib.suppress(OSError):  # a full disk, or a home that is read-only: the next worker makes it anew
        _write(path, made)
    return made


def _read(file: BinaryIO) -> NDArray[np.int64]:
    file.seek(0)
    found: NDArray[np.int64] = np.load(file, allow_pickle=False)
    return found


def _write(path: Path, index: NDArray[np.int64]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            np.save(file, index, allow_pickle=False)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
