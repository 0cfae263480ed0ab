"""What a job's workers and the driver tell each other, by files in a folder that they share; importable without a framework."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.processes import Growing

VARIABLE = "EXPERIMENT_FOLDER"
_SETTINGS, _STEPS = "settings.json", "steps.jsonl"


class Policy(StrEnum):
    BATCH = "batch"  # a fixed global batch; the learning rate is left alone
    RATE = "rate"  # a fixed batch per worker; the learning rate is times the number of workers


class Data(StrEnum):
    DIGITS = "digits"  # scikit-learn's, brought to 3 x 32 x 32
    CIFAR10 = "cifar10"


@dataclass(frozen=True, slots=True)
class Settings:
    """``samples``: of the training images the first so many. ``epoch_factor``: published epochs that one stands for.

    ``reference``: the number of workers that a fixed global batch is worth. ``holds``: steps after which all wait.
    """

    policy: Policy
    data: Data
    samples: int
    epoch_factor: float
    reference: int
    holds: tuple[int, ...] = ()

    def write(self, folder: Path) -> None:
        (folder / _SETTINGS).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """In a worker."""
        return TypeAdapter(cls).validate_json((shared_folder(environ) / _SETTINGS).read_text())


def shared_folder(environ: Mapping[str, str]) -> Path:
    """In a worker: the folder of its job.

    Raises:
        ValueError: the driver has not named it.
    """
    if not environ.get(VARIABLE):
        raise ValueError(f"${VARIABLE} is not set: this module is trained by `python -m benchmarks.experiment3`")
    return Path(environ[VARIABLE])


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    workers: int
    loss: float
    learning_rate: float

    def append(self, folder: Path) -> None:
        """One write, as whoever is rank 0 in the next world goes on with the file."""
        with (folder / _STEPS).open("ab", buffering=0) as lines:
            lines.write((json.dumps(asdict(self)) + "\n").encode())


def read_steps(folder: Path) -> Iterator[Step]:
    """Those made so far."""
    return (Step(**json.loads(line)) for line in Growing(folder / _STEPS).new_lines())


def held_file(folder: Path, step: int) -> Path:
    """Is there once the workers wait after this step."""
    return folder / f"held-{step}"


def go_file(folder: Path, step: int) -> Path:
    """Is there once they may go on."""
    return folder / f"go-{step}"
