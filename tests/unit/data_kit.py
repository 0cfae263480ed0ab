"""Record files for tests, written without TensorFlow, and what is said of those that can't be read."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from refusal_kit import refused

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.common.errors import UserError
from elasticdl.data.open import open_records


def tfrecord(path: Path, records: Iterable[bytes]) -> Path:
    def framed(record: bytes) -> bytes:
        length = struct.pack("<Q", len(record))
        return length + struct.pack("<I", masked_crc32c(length)) + record + struct.pack("<I", masked_crc32c(record))

    path.write_bytes(b"".join(map(framed, records)))
    return path


def text(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def refusal(where: Path | str, error: type[UserError] = UserError, **params: object) -> str:
    """The line for files that can't be read."""
    return refused("", lambda: read_all(where, params), error)


def read_all(where: Path | str, params: dict[str, object]) -> object:
    records = open_records(str(where), params)
    return records.read(range(len(records)))
