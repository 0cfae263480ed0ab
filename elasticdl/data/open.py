"""Opening files of records, each in the format that its name or its first bytes tell."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elasticdl.common.errors import UserError
from elasticdl.data.records import RecordFile, Records
from elasticdl.data.storage import Storage, find_files
from elasticdl.data.text import open_csv, open_text
from elasticdl.data.tfrecord import open_tfrecord

Kind = Literal["TFRecord", "CSV", "Text"]

THREADS = 8  # that open files at once; it matters where they are far away
SUFFIXES: Mapping[str, Kind] = {
    ".tfrecord": "TFRecord",
    ".tfrecords": "TFRecord",
    ".tfrec": "TFRecord",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".txt": "Text",
}
_GZIP = b"\x1f\x8b"
_RECORDIO = struct.pack("<I", 0x01020304)


class ReaderParams(BaseModel):
    """What ``--data_reader_params`` may say of files."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    reader_type: Kind | None = None
    columns: list[str] | None = Field(None, min_length=1)
    sep: str | None = Field(None, min_length=1, max_length=1)
    header: bool = True


def _open(name: str, storage: Storage, params: ReaderParams) -> RecordFile | None:
    """None if the file is empty."""
    kind = params.reader_type or _kind(name, storage)
    size = storage.size(name)
    if not size:
        return None
    if storage.read(name, [(0, min(size, 2))])[0] == _GZIP:
        raise UserError(f"{name}: compressed, so no record can be read by itself; expected a plain file: unpack it")
    match kind:
        case "TFRecord":
            return open_tfrecord(name, storage)
        case "CSV":
            sep = params.sep or ("\t" if name.endswith(".tsv") else ",")
            return open_csv(name, storage, sep, params.columns, header=params.header)
        case "Text":
            return open_text(name, storage)
    raise UserError(
        f"{name}: of no known format; expected {', '.join(SUFFIXES)}, or --data_reader_params \"reader_type='CSV'\", or a module "
        "whose dataset(mode, path) reads it"
    )


def _kind(name: str, storage: Storage) -> Kind | None:
    last = name.rpartition("/")[2].lower()
    for suffix, kind in SUFFIXES.items():  # part-00001.tfrecord, but also train.tfrecord-00001-of-00010
        if last.endswith(suffix) or f"{suffix}-" in last:
            return kind
    if storage.size(name) < 12:
        return None
    beginning = storage.read(name, [(0, 12)])[0]
    if beginning.startswith(_RECORDIO):
        raise UserError(f"{name}: a RecordIO file; expected a TFRecord: write its records with tf.io.TFRecordWriter")
    is_tfrecord = beginning[4:8] == bytes(4)  # the upper half of the length of the first record
    return "TFRecord" if is_tfrecord else None


def open_records(where: str, params: Mapping[str, object]) -> Records:
    """The records of all files that a path names (see `find_files`).

    Raises:
        ArgumentError: it names no files.
        UserError: a parameter is unknown or wrong, or a file is damaged or of another kind.
    """
    files = find_files(where)
    open_one = partial(_open, storage=Storage(), params=_checked(params))
    with ThreadPoolExecutor(THREADS) as pool:
        opened = [file for file in pool.map(open_one, files) if file is not None]
    for file in opened[1:]:
        if type(file) is not type(opened[0]):
            raise UserError(f"{file.name}: of another format than {opened[0].name}; expected one format in {where}")
    if not any(len(file) for file in opened):
        raise UserError(
            f"{where}: not one record in {'these files' if len(files) > 1 else 'this file'}; expected at least one"
        )
    return Records(opened)


def _checked(params: Mapping[str, object]) -> ReaderParams:
    try:
        return ReaderParams.model_validate(dict(params))
    except ValidationError as error:
        finding = error.errors()[0]
        name = ".".join(map(str, finding["loc"]))
        if finding["type"] == "extra_forbidden":
            raise UserError(
                f"--data_reader_params: unknown {name}; expected {', '.join(ReaderParams.model_fields)}"
            ) from None
        raise UserError(f"--data_reader_params: {name}={finding['input']!r}: {finding['msg']}") from None
