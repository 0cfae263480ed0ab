"""TFRecord files, read by offset.

A record is its length (8 bytes, little endian), a checksum of the length (4), the data, and a checksum of the data (4).
The index is made from the lengths alone. The first length's checksum is compared, which tells other files apart;
those of the data are not, as that would read everything once before training. The lengths of a remote file are read
window by window.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.common.errors import UserError
from elasticdl.data.records import PieceFile
from elasticdl.data.storage import Storage

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
        ends = _find_ends(name, size, window_at)
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
