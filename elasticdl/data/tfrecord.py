"""TFRecord files, read by offset.

A record is its length (8 bytes, little endian), a checksum of the length (4), the data, and a checksum of the data (4).
The index is made from the lengths alone. The first length's checksum is compared, which tells other files apart;
those of the data are not, as that would read everything once before training. The lengths of a remote file are read
window by window, and its index is kept on this machine for the next worker.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.index_cache import keep
from elasticdl.data.records import NO_COLUMNS, Batch, Metadata
from elasticdl.data.storage import Storage

HEADER, FOOTER = 12, 4  # bytes around the data
WINDOW_BYTES = 8 << 20  # as much as is faster to read than to ask for another place
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class TFRecordFile:
    """Records are byte strings, as the writer gave them."""

    name: str
    storage: Storage
    starts: NDArray[np.int64]  # of the data
    ends: NDArray[np.int64]
    metadata: Metadata = NO_COLUMNS

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, rows: Sequence[int]) -> Batch:
        pieces = list(zip(self.starts[rows].tolist(), self.ends[rows].tolist(), strict=True))
        records = np.empty(len(rows), object)
        records[:] = self.storage.read(self.name, pieces)
        return records


def open_tfrecord(name: str, storage: Storage) -> TFRecordFile:
    """Find all records.

    Raises:
        UserError: it is no TFRecord file, or was cut short.
    """
    size = storage.size(name)
    if not size:
        return TFRecordFile(name, storage, np.empty(0, np.int64), np.empty(0, np.int64))
    if "://" in name:
        ends = keep(storage.version(name), lambda: _find_ends(name, size, lambda at: _window(name, storage, size, at)))
    else:
        with storage.open(name) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            ends = _find_ends(name, len(mapped), lambda at: mapped)
    starts = np.concatenate([[HEADER], ends[:-1] + (FOOTER + HEADER)]).astype(np.int64)
    return TFRecordFile(name, storage, starts, ends)


def _window(name: str, storage: Storage, size: int, start: int) -> bytes:
    return storage.read(name, [(start, min(start + WINDOW_BYTES, size))])[0]


def _find_ends(name: str, size: int, window_at: Callable[[int], bytes | mmap.mmap]) -> NDArray[np.int64]:
    """Where the data of each record end. ``window_at``: gives the content from a place on, or some of it."""
    window, begins = window_at(0), 0
    _require_tfrecord(name, window[:HEADER])
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


def _require_tfrecord(name: str, header: bytes) -> None:
    if len(header) < HEADER or _masked_crc32c(header[:8]) != _CHECKSUM.unpack_from(header, 8)[0]:
        raise UserError(f"{name}: not a TFRecord file: its first 12 bytes are no length with its checksum")


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    table = _crc32c_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))
