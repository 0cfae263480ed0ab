"""The places of one machine that can hold a worker: its GPUs, or as many processes as wanted where there are none.

A GPU is leased with a lock on a file of the user, so that two jobs on one machine never share one by accident: a job
with more slots than GPUs shares them, and only with others of that kind. The lock goes with the process that holds it,
however that ends.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from elasticdl.common.environment import SHARED_GPU

QUERY_SECONDS = 20.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slot:
    """One place. ``environment`` is what a worker in it must have set."""

    index: int
    environment: Mapping[str, str] = field(default_factory=dict)


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """The ids of the GPUs that this process may use; empty where there is no NVIDIA driver, or none that answers."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("can't list the GPUs, going on as if there were none: %s", error)
        return []
    gpus = re.findall(r"^GPU \d+:.*\(UUID: (\S+)\)", listing, re.MULTILINE)
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    allowed = [part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",") if part.strip()]
    seen = itertools.takewhile(lambda device: not _refused(device, gpus), allowed)  # so does CUDA
    return [gpus[int(device)] if device.isdigit() else device for device in seen]


def _refused(device: str, gpus: Sequence[str]) -> bool:
    return device.lstrip("-").isdigit() and not 0 <= int(device) < len(gpus)


class Slots:
    """Hands out places; ``count`` 0 means one per GPU, or without limit where there are no GPUs."""

    def __init__(self, count: int, gpus: Sequence[str], locks: Path) -> None:
        self._gpus = gpus
        self._count = count or len(gpus)
        self._shared = 0 < len(gpus) < self._count
        self._locks = locks
        self._leases: dict[int, IO[str] | None] = {}

    def acquire(self) -> Slot | str:
        """A free place, or why there is none at the moment."""
        if self._count and len(self._leases) >= self._count:
            kind = "GPU" if self._gpus and not self._shared else "slot"
            return f"every {kind} is taken ({self._count})"
        if not self._gpus:
            index = next(i for i in range(len(self._leases) + 1) if i not in self._leases)
            self._leases[index] = None
            return Slot(index)
        try:
            for index in range(max(self._count, len(self._gpus))):
                if index not in self._leases and self._lease(index):
                    shared = {SHARED_GPU: "1"} if self._shared else {}
                    return Slot(index, {"CUDA_VISIBLE_DEVICES": self._gpu(index), **shared})
        except OSError as error:
            return f"can't lease a GPU in {self._locks}: {error.strerror}"
        return "every GPU is taken, some by other jobs of yours"

    def release(self, slot: Slot) -> None:
        if lock := self._leases.pop(slot.index, None):
            lock.close()

    def _gpu(self, index: int) -> str:
        return self._gpus[index % len(self._gpus)]

    def _lease(self, index: int) -> bool:
        self._locks.mkdir(parents=True, exist_ok=True)
        lock = (self._locks / f"{self._gpu(index)}.lock").open("w")
        os.set_inheritable(lock.fileno(), False)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._leases[index] = lock
        return True
