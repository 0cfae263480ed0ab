"""Makes a small learnable stand-in for CIFAR-10 in the format of its official archives.

    python model_zoo/cifar10/generate.py --out DIR [--format python|binary] [--samples N] [--seed S]

Each class is a smooth pattern of colours under noise. Needs numpy only. The same options give the same file.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Format = Literal["python", "binary"]
Batch = tuple[NDArray[np.uint8], list[int]]  # N x 3072 pixels, N labels

LABEL_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FOLDERS: dict[Format, str] = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}
TRAINING_BATCHES = 5
NOISE = 48.0


def generate(out: Path, fmt: Format = "python", samples: int = 5000, seed: int = 0) -> Path:
    """Write ``out/cifar-10-FMT.tar.gz``: `samples` for training in five batches, and a fifth of that for tests.

    The file appears whole or not at all; one of that name is replaced.
    """
    if samples < TRAINING_BATCHES:
        raise ValueError(f"{samples} samples: expected at least {TRAINING_BATCHES}, one for each training batch")
    make = _python_files if fmt == "python" else _binary_files
    content = _pack({f"{FOLDERS[fmt]}/{name}": blob for name, blob in make(_draw(samples, seed)).items()})
    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"cifar-10-{fmt}.tar.gz"
    scratch = out / f".{archive.name}.{os.getpid()}"
    try:
        scratch.write_bytes(content)
        scratch.replace(archive)
    finally:
        scratch.unlink(missing_ok=True)
    return archive


def _draw(samples: int, seed: int) -> dict[str, Batch]:
    random = np.random.default_rng(seed)
    coarse = random.uniform(48, 208, (len(LABEL_NAMES), 3, 4, 4))
    coarse = (coarse + coarse[..., ::-1]) / 2  # symmetric, so that a flipped image still belongs to its class
    patterns = coarse.repeat(8, axis=2).repeat(8, axis=3).reshape(len(LABEL_NAMES), -1)
    sizes = [len(part) for part in np.array_split(np.arange(samples), TRAINING_BATCHES)] + [samples // TRAINING_BATCHES]
    names = [f"data_batch_{number}" for number in range(1, TRAINING_BATCHES + 1)] + ["test_batch"]
    batches = {}
    for name, size in zip(names, sizes, strict=True):
        labels = random.permutation(size) % len(LABEL_NAMES)
        noise = random.normal(0, NOISE, (size, patterns.shape[1]))
        batches[name] = ((patterns[labels] + noise).clip(0, 255).astype(np.uint8), labels.tolist())
    return batches


def _binary_files(batches: dict[str, Batch]) -> dict[str, bytes]:
    files = {
        f"{name}.bin": np.column_stack([np.array(labels, np.uint8), data]).tobytes()
        for name, (data, labels) in batches.items()
    }
    return {"batches.meta.txt": "".join(f"{name}\n" for name in LABEL_NAMES).encode(), **files}


def _python_files(batches: dict[str, Batch]) -> dict[str, bytes]:
    files = {
        "batches.meta": _pickle_as_python2(
            {
                b"num_cases_per_batch": len(batches["data_batch_1"][1]),
                b"label_names": [name.encode() for name in LABEL_NAMES],
                b"num_vis": 3072,
            }
        )
    }
    for name, (data, labels) in batches.items():
        number = name.removeprefix("data_batch_")
        title = "testing batch 1 of 1" if name == "test_batch" else f"training batch {number} of {TRAINING_BATCHES}"
        filenames = [f"{LABEL_NAMES[label]}_s_{index:06}.png".encode() for index, label in enumerate(labels)]
        files[name] = _pickle_as_python2(
            {b"batch_label": title.encode(), b"labels": labels, b"data": data, b"filenames": filenames}
        )
    return files


def _pickle_as_python2(value: object) -> bytes:
    """Protocol 2 with the byte strings of Python 2, which today's `pickle` reads but can't write."""
    return pickle.PROTO + b"\x02" + _opcodes(value) + pickle.STOP


def _opcodes(value: object) -> bytes:
    match value:
        case None:
            return pickle.NONE
        case bool():
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        case int():
            return pickle.BININT + struct.pack("<i", value)
        case bytes():
            return pickle.BINSTRING + struct.pack("<i", len(value)) + value
        case tuple():
            return pickle.MARK + b"".join(map(_opcodes, value)) + pickle.TUPLE
        case list():
            return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_opcodes, value)) + pickle.APPENDS
        case dict():
            items = b"".join(_opcodes(key) + _opcodes(item) for key, item in value.items())
            return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
        case np.ndarray():
            return _array_opcodes(value)
    raise TypeError(f"{type(value).__name__} is in no CIFAR-10 file")


def _array_opcodes(array: NDArray[np.uint8]) -> bytes:
    """What Python 2's numpy wrote for a uint8 array in C order."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + pickle.MARK + b"cnumpy\nndarray\n" + _opcodes((0,))
    dtype = b"cnumpy\ndtype\n" + _opcodes((b"u1", 0, 1)) + pickle.REDUCE
    dtype += _opcodes((3, b"|", None, None, None, -1, -1, 0)) + pickle.BUILD
    state = pickle.MARK + _opcodes(1) + _opcodes(array.shape) + dtype + _opcodes(False) + _opcodes(array.tobytes())
    return empty + _opcodes(b"b") + pickle.TUPLE + pickle.REDUCE + state + pickle.TUPLE + pickle.BUILD


def _pack(files: dict[str, bytes]) -> bytes:
    """A gzipped tar without times or owners, so that equal contents are equal files."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, blob in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
    return packed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small learnable data set in the format of CIFAR-10.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive; made if need be")
    parser.add_argument("--format", choices=list(FOLDERS), default="python", help="version of the format (python)")
    parser.add_argument("--samples", type=int, default=5000, help="for training; a fifth is added for tests (5000)")
    parser.add_argument("--seed", type=int, default=0, help="of patterns and noise (0)")
    options = parser.parse_args()
    try:
        print(generate(options.out, options.format, options.samples, options.seed))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
