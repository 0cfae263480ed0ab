"""Which jobs there are, and at which step each world of an elastic one begins; and what workers and driver tell each other.

The same seed gives the same plan. What is told goes by files in a folder that all share. Importable without a framework.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.processes import Growing

VARIABLE = "EXPERIMENT_FOLDER"
_TASK, _STEPS = "task.json", "steps.jsonl"


class Policy(StrEnum):
    BATCH = "batch"  # a fixed global batch; the learning rate is left alone
    RATE = "rate"  # a fixed batch per worker; the learning rate is times the number of workers


class Data(StrEnum):
    DIGITS = "digits"  # scikit-learn's, brought to 3 x 32 x 32
    CIFAR10 = "cifar10"


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


FEWEST, MOST = 2, 4
PUBLISHED_EPOCHS = 90


class Kind(StrEnum):
    """How many workers a job has."""

    TWO = "2"
    FOUR = "4"
    ELASTIC = "elastic"  # from two to four, beginning with two


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained on, and in which batches.

    ``worker_batch`` samples a worker; the fixed global batch is that of ``reference`` workers, cut into micro-batches of
    ``micro_batch``, by which the share of two, three and four workers can be divided: batch norm sees the same ones.
    ``samples`` is a multiple of the global batch, so that this holds for the last step of an epoch, too.
    """

    data: Data
    samples: int
    worker_batch: int
    reference: int
    micro_batch: int

    @property
    def global_batch(self) -> int:
        return self.worker_batch * self.reference

    def steps_per_epoch(self, policy: Policy, workers: int) -> int:
        batch = self.global_batch if policy is Policy.BATCH else self.worker_batch * workers
        return -(-self.samples // batch)


DIGITS = Recipe(Data.DIGITS, samples=864, worker_batch=32, reference=3, micro_batch=8)
CIFAR10 = Recipe(Data.CIFAR10, samples=49_920, worker_batch=128, reference=3, micro_batch=32)


@dataclass(frozen=True, slots=True)
class Change:
    """After ``step`` steps a world of ``workers`` begins."""

    step: int
    workers: int


@dataclass(frozen=True, slots=True)
class Job:
    policy: Policy
    kind: Kind
    seed: int  # of weights, order of samples and changes
    epochs: int
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.kind}-{self.seed}"

    @property
    def first_workers(self) -> int:
        return FEWEST if self.kind is Kind.ELASTIC else int(self.kind)

    @property
    def holds(self) -> list[int]:
        """Steps after which all wait: one before each change, as that step is still made in the old world."""
        return [change.step - 1 for change in self.changes]

    @property
    def epoch_factor(self) -> float:
        """Published epochs that one stands for."""
        return PUBLISHED_EPOCHS / self.epochs

    def batch_flags(self, recipe: Recipe) -> dict[str, int]:
        if self.policy is Policy.RATE:
            return {"minibatch_size": recipe.worker_batch}
        return {"global_batch_size": recipe.global_batch, "max_worker_batch_size": recipe.micro_batch}


@dataclass(frozen=True, slots=True)
class Task:
    """What a job's workers are told."""

    job: Job
    recipe: Recipe

    def write(self, folder: Path) -> None:
        (folder / _TASK).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Task:
        """In a worker."""
        return TypeAdapter(cls).validate_json((shared_folder(environ) / _TASK).read_text())


def draw_changes(recipe: Recipe, policy: Policy, epochs: int, count: int, seed: int) -> tuple[Change, ...]:
    """So many, spread over the training, each to another number of workers, the first up from the fewest.

    Raises:
        ValueError: the training is too short for them.
    """
    steps = epochs * recipe.steps_per_epoch(policy, MOST)  # of the shortest training that the changes can make
    parts = [round(steps * place / (count + 1)) for place in range(count + 2)]
    if any(after - before < 2 for before, after in pairwise(parts)):
        raise ValueError(f"{steps} steps are too few for {count} changes of workers: give a smaller --scale")
    drawn = random.Random(f"{policy} {seed}")  # a text, so that neighbouring seeds have nothing in common
    changes: list[Change] = []
    workers = FEWEST
    for earliest, latest in pairwise(parts[:-1]):
        workers = drawn.choice([number for number in range(FEWEST, MOST + 1) if number != workers])
        changes.append(Change(drawn.randint(max(earliest, 0) + 2, latest), workers))
    return tuple(changes)


def make_jobs(recipe: Recipe, policies: Sequence[Policy], seeds: Sequence[int], epochs: int, count: int) -> list[Job]:
    """Seed by seed, so that what an interruption leaves can be compared.

    Raises:
        ValueError: the training is too short for so many changes.
    """
    return [
        Job(
            policy,
            kind,
            seed,
            epochs,
            draw_changes(recipe, policy, epochs, count, seed) if kind is Kind.ELASTIC else (),
        )
        for seed in seeds
        for policy in policies
        for kind in (Kind.ELASTIC, Kind.TWO, Kind.FOUR)
    ]
