"""Reads CIFAR-10 as it is published, from the python or the binary version, packed or unpacked.

    python   cifar-10-python.tar.gz, cifar-10-batches-py/: pickled dicts with b"data" (uint8, N x 3072) and b"labels"
    binary   cifar-10-binary.tar.gz, cifar-10-batches-bin/: records of one label byte and 3072 pixels

3072 pixels are 3 x 32 x 32, channel by channel. A pickle is a program: only what these files need is admitted.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
EVALUATION = ("test_batch",)
CLASSES = 10
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
SUFFIXES = ("", ".bin")  # of the python version and of the binary one
PLACES = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")
EXPECTED = f"expected one of {', '.join(PLACES)}, or the folder that holds it"

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]


def open_split(mode: str, path: str) -> Split:
    """What a model trains on, or is evaluated on, of the CIFAR-10 at `path`.

    Raises:
        ValueError: `mode` is unknown, or there is no whole CIFAR-10 at `path`.
    """
    if mode not in ("training", "evaluation", "prediction"):
        raise ValueError(f"dataset mode {mode!r}: expected 'training', 'evaluation' or 'prediction'")
    training = mode == "training"
    if not path:
        option = "--training_data" if training else "--validation_data"
        raise ValueError(f"{option} is missing; {EXPECTED}")
    return read_split(Path(path), TRAINING if training else EVALUATION)


def read_split(path: Path, batches: Sequence[str]) -> Split:
    """Images (N x 3 x 32 x 32) and labels of the named batches, in that order.

    Raises:
        ValueError: nothing of CIFAR-10 is at `path`, or a file is damaged; one line that names the file.
    """
    source = _locate(path)
    blobs = _read_folder(source, batches) if source.is_dir() else _read_tar(source, batches)
    for suffix in SUFFIXES:
        if all(batch + suffix in blobs for batch in batches):
            decode = _decode_binary if suffix else _decode_pickle
            splits = [decode(blobs[batch + suffix], f"{source}/{batch}{suffix}") for batch in batches]
            return np.concatenate([images for images, _ in splits]), np.concatenate([labels for _, labels in splits])
    found = ", ".join(sorted(blobs)) or "none of them"
    raise ValueError(f"{source}: expected {', '.join(batches)} (each with .bin in the binary version), found {found}")


def _locate(path: Path) -> Path:
    """The archive or the folder of batches that `path` is or holds."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; {EXPECTED}")
    if path.name in PLACES or any((path / f"{TRAINING[0]}{suffix}").exists() for suffix in SUFFIXES):
        return path
    for place in PLACES:
        if (path / place).exists():
            return path / place
    raise ValueError(f"{path}: no CIFAR-10 in this folder; {EXPECTED}")


def _read_folder(folder: Path, batches: Sequence[str]) -> dict[str, bytes]:
    files = [folder / f"{batch}{suffix}" for suffix in SUFFIXES for batch in batches]
    try:
        return {file.name: file.read_bytes() for file in files if file.exists()}
    except OSError as error:
        raise ValueError(f"{error.filename}: can't be read: {error.strerror}") from error


def _read_tar(archive: Path, batches: Sequence[str]) -> dict[str, bytes]:
    """The wanted members, read in one pass and without unpacking anything to disk."""
    blobs: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name.removesuffix(".bin") in batches and (content := tar.extractfile(member)) is not None:
                    blobs[name] = content.read()
                if len(blobs) == len(batches):
                    break
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise ValueError(f"{archive}: not a tar archive, or cut short ({reason}); {EXPECTED}") from error
    return blobs


def _decode_binary(blob: bytes, where: str) -> Split:
    if not blob or len(blob) % RECORD:
        raise ValueError(
            f"{where}: {len(blob):,} bytes, expected a multiple of {RECORD:,} (label and pixels); is it cut short?"
        )
    records = np.frombuffer(blob, np.uint8).reshape(-1, RECORD)
    return _checked(records[:, 1:], records[:, 0], where)


def _decode_pickle(blob: bytes, where: str) -> Split:
    try:
        batch = _Unpickler(io.BytesIO(blob), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where}: not a CIFAR-10 batch, or cut short ({reason})") from error
    data, labels = (batch.get(b"data"), batch.get(b"labels")) if isinstance(batch, dict) else (None, None)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or not isinstance(labels, list):
        raise ValueError(f"{where}: expected a dict with b'data' (a uint8 array) and b'labels' (a list)")
    if not all(isinstance(label, int) for label in labels):
        raise ValueError(f"{where}: b'labels' must be whole numbers")
    return _checked(data, np.array(labels, np.int64), where)


def _checked(data: NDArray[np.uint8], labels: NDArray[Any], where: str) -> Split:
    if data.shape != (len(labels), PIXELS) or not len(labels):
        raise ValueError(f"{where}: data of shape {data.shape} with {len(labels)} labels, expected N x {PIXELS} with N")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise ValueError(f"{where}: labels from {labels.min()} to {labels.max()}, expected 0 to {CLASSES - 1}")
    return data.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class _Unpickler(pickle.Unpickler):
    """Admits numpy arrays beside the built-in types that need no import; anything else is refused unexecuted."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return np.empty(0).__reduce__()[0]  # by whichever of its two names this numpy knows it
            case "numpy", "ndarray":
                return np.ndarray
            case "numpy", "dtype":
                return np.dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs")
