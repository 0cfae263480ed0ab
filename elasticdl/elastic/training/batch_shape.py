"""The job of this process in the numbers that a script asks for: ``elasticdl.elastic.steps`` and its like.

For a global batch of G samples, at most M in one micro-batch and N GPUs:

    steps        micro-batches accumulated per optimizer step      ceil(G / (M * N))
    batch_size   samples of a micro-batch on one GPU               ceil(G / (steps * N)), never above M

Where G can't be divided evenly these are those of the GPU with the largest share; others run micro-batches that are smaller
by one sample, or one fewer of them, so that the sum is always G.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.elastic.core.plan import BatchPlan, BatchPolicy
from elasticdl.elastic.training.job import JobContext

PREPARE = (
    "optimizer.step() under `elasticdl run`, before the loop was prepared: each worker would train by itself. Write `model, optimizer, loader = "
    "elasticdl.elastic.torch.prepare(model, optimizer, loader)` before the loop (docs/runai.md)"
)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How a step is divided at present."""

    steps: int
    batch_size: int
    global_batch_size: int
    gpus: int
    master: bool  # whether this process is the one that writes what is to be written once

    @classmethod
    def of(cls, policy: BatchPolicy, gpus: int, rank: int) -> BatchShape:
        batch = policy.batch_size(gpus)
        largest = BatchPlan.equal(range(batch), gpus).mine(0, policy.max_micro_batch)
        return cls(len(largest), largest[0].samples, batch, gpus, rank == 0)


def whole_number(name: str, value: Any, least: int = 1, below: int | None = None) -> int:
    """An argument of `init`.

    Raises:
        ArgumentError: it is no whole number, or out of these bounds.
    """
    is_one = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_one or int(value) < least or (below is not None and int(value) >= below):
        bound = "" if below is None else f" and below 2**{below.bit_length() - 1}"
        raise ArgumentError(f"elastic.init: {name} must be a whole number of at least {least}{bound}, not {value!r}")
    return int(value)


def make_policy(global_batch_size: Any, batch_size_per_worker: Any, max_gpu_batch_size: Any) -> BatchPolicy:
    """The policy that `init` was asked for. The memory bound may be above the batch: then it never matters.

    Raises:
        ArgumentError: the numbers make no sense.
    """
    given = {
        "global_batch_size": global_batch_size,
        "batch_size_per_worker": batch_size_per_worker,
        "max_gpu_batch_size": max_gpu_batch_size,
    }
    numbers = [None if value is None else whole_number(name, value) for name, value in given.items()]
    if (global_batch_size is None) == (batch_size_per_worker is None):
        raise ArgumentError("elastic.init: give either global_batch_size or batch_size_per_worker")
    return BatchPolicy(*numbers)


@dataclass(slots=True)
class CurrentJob:
    """The one job of this process: under a master its workers count, alone the GPUs."""

    context: JobContext | None = None
    gpus: int = 1  # that a script which runs alone computes on
    _asked_whole: bool = False
    _is_whole: bool = False

    def use_one_gpu(self) -> int:
        """Alone, this process computes on one GPU from now on; returns how many it might have used."""
        gpus, self.gpus = self.gpus, 1
        return gpus

    @property
    def under_master(self) -> bool:
        """Whether there may be other workers."""
        return self.context is not None and self.context.under_master

    @property
    def numbers(self) -> BatchShape:
        """Raises:
        UserError: `init` has not been called.
        """
        if self.context is None:
            raise UserError(
                "call elasticdl.elastic.torch.init(global_batch_size, max_gpu_batch_size), or that of elastic.keras, first"
            )
        context = self.context
        gpus = context.size if self.under_master else self.gpus
        shape = BatchShape.of(context.policy, 1 if self._is_whole else gpus, context.rank)
        return replace(shape, gpus=gpus)

    def number(self, name: str) -> Any:
        """One of `numbers`, as a script asks for it.

        Raises:
            UserError: `init` has not been called.
        """
        context = self.context
        if (
            context is not None
            and context.divides_batches
            and not context.has_world
            and not self._is_whole
            and name in ("steps", "batch_size")
        ):
            self._asked_whole = True  # before there are workers: these are the numbers of one
            context.forbid_steps(PREPARE)
        return getattr(self.numbers, name)

    def take_whole(self) -> None:
        """The script's loop is that of one worker, of whose batches each has its part."""
        self._is_whole = True

    def require_divided(self) -> None:
        """The script's loop divides batches among workers.

        Raises:
            UserError: it has asked for the numbers before there were workers.
        """
        if self._asked_whole and self.under_master:
            raise UserError(
                "elasticdl.elastic.steps and batch_size: under `elasticdl run` the workers are not known before the function under "
                "@elastic.run, and come and go: a loop of your own gets its batches from elastic.DataLoader (docs/library.md)"
            )


# Horovod, too, knows one world per process: `elasticdl.elastic.steps` can only mean that one.
job = CurrentJob()
