"""Indexes of remote files, kept on this machine: a worker that starts later need not read the files for them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray


def keep(version: str, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """What ``make`` returns, or what it returned before for this version of a file; not kept if the version is empty.

    Raises:
        Exception: whatever ``make`` raises.
    """
    if not version:
        return make()
    path = _folder() / f"{hashlib.sha256(version.encode()).hexdigest()}.npy"
    # Not there, or written by a process that died: it is made anew.
    with contextlib.suppress(OSError, ValueError, EOFError), path.open("rb") as file:
        found: NDArray[np.int64] = np.load(file, allow_pickle=False)
        return found
    made = make()
    with contextlib.suppress(OSError):  # a full disk, or a home that is read-only: the next worker makes it anew
        _write(path, made)
    return made


def _write(path: Path, index: NDArray[np.int64]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            np.save(file, index, allow_pickle=False)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _folder() -> Path:
    return platformdirs.user_cache_path("elasticdl") / "indexes"
