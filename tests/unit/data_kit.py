"""Record files for tests, written without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from elasticdl.common.crc32c import masked_crc32c


def tfrecord(path: Path, records: Iterable[bytes]) -> Path:
    def framed(record: bytes) -> bytes:
        length = struct.pack("<Q", len(record))
        return length + struct.pack("<I", masked_crc32c(length)) + record + struct.pack("<I", masked_crc32c(record))

    path.write_bytes(b"".join(map(framed, records)))
    return path


def text(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path
