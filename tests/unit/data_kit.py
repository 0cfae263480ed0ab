"""Record files for tests, and what is said of those that can't be read."""

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


def examples(path: Path, numbers: Iterable[int]) -> Path:
    """TensorFlow's, with two features ``x`` and a label ``y``."""
    from tensorflow.train import Example, Feature, Features, FloatList, Int64List

    def example(number: int) -> bytes:
        x, y = Feature(float_list=FloatList(value=[number, -number])), Feature(int64_list=Int64List(value=[number]))
        return Example(features=Features(feature={"x": x, "y": y})).SerializeToString()

    return tfrecord(path, map(example, numbers))


def text(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def refusal(where: Path | str, error: type[UserError] = UserError, **params: object) -> str:
    """The line for files that can't be read."""

    def read() -> None:
        records = open_records(str(where), params)
        records.read(range(len(records)))

    return refused("", read, error)
