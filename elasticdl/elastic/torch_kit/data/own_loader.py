"""The global batches of a script's own loader, and the part of each that a worker loads."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from elasticdl.elastic.core.plan import BatchPlan, MicroBatch, Samples
from elasticdl.elastic.core.world import World
from elasticdl.elastic.torch_kit import gpu
from elasticdl.elastic.torch_kit.data.draws import Draws
from elasticdl.elastic.torch_kit.data.stand_in import SAMPLES_LOADED, Repeated, StandIn
from elasticdl.elastic.torch_kit.refusals import of_loader, refuse
from elasticdl.elastic.training.children import require_guard


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """One batch as the script's loader makes it. ``position``: samples of the epoch that come before it."""

    epoch: int
    number: int  # in the epoch, from 0
    position: int
    indices: Sequence[Any]
    is_last: bool = False  # of the epoch

    @property
    def start(self) -> tuple[int, int]:
        return self.epoch, self.position

    @property
    def end(self) -> int:
        return self.position + len(self.indices)

    def plan(self, workers: int, least: int = 1, seed: int = 0) -> BatchPlan:
        """``least``: see `equal_shares`. ``seed``: of its epoch."""
        return BatchPlan.equal(self.indices, workers, least=least, seed=seed, step=self.number)


class OwnLoader:
    """What the script's own ``DataLoader`` would load, loaded in parts."""

    def __init__(self, loader: DataLoader[Any], who: str = "elastic.prepare") -> None:
        """``who``: has been given the loader, for messages.

        Raises:
            UserError: it can't be loaded in parts.
        """
        refuse(who, of_loader(loader))
        self.loader = loader
        self.draws = Draws(loader)
        self.source = replace(self.draws.data, batch=loader.batch_size)
        self._guarded = False

    @property
    def size(self) -> int:
        """Samples of a batch, as far as the loader tells."""
        batch_sampler = self.loader.batch_sampler
        return int(self.loader.batch_size or getattr(batch_sampler, "batch_size", None) or 1)

    def of_epoch(self, epoch: int) -> list[GlobalBatch]:
        """Draws what the loader itself would draw: the seed of its processes, and the order."""
        self.draws.draw_seed()
        return self.order_of(epoch)

    def order_of(self, epoch: int) -> list[GlobalBatch]:
        """A sampler can't be asked for a part of its order, nor twice: all of it is drawn as the epoch begins, and kept."""
        every = [list(indices) for indices in self.loader.batch_sampler or ()]
        starts = accumulate(map(len, every), initial=0)
        last = len(every) - 1
        return [GlobalBatch(epoch, *each, is_last=each[0] == last) for each in zip(count(), starts, every)]

    def load(self, parts: Iterable[MicroBatch], seed: int) -> Iterator[Any]:
        """By as many processes as the script's loader has. ``parts`` are taken as they are needed. ``seed``: of what the processes draw at random."""
        given = self.loader
        if given.num_workers and not self._guarded:
            require_guard(given.num_workers)
            self._guarded = True
        return iter(
            DataLoader(
                given.dataset,
                batch_sampler=(list(part.indices) for part in parts),
                num_workers=given.num_workers,
                collate_fn=given.collate_fn,
                pin_memory=given.pin_memory,
                timeout=given.timeout,
                worker_init_fn=given.worker_init_fn,
                prefetch_factor=given.prefetch_factor,
                # From the global one, which the script believes to be its own, nothing must be drawn.
                generator=torch.Generator().manual_seed(seed),
                # A fork would take the session's threads and locks along.
                multiprocessing_context="forkserver" if given.num_workers else None,
            )
        )

    def stand_in(self, batch: GlobalBatch, workers: int) -> StandIn:
        """For this worker's part of a batch, among so many."""
        samples = max(*batch.plan(workers).shares, SAMPLES_LOADED)
        few = batch.indices[:SAMPLES_LOADED]
        return StandIn(self.load_at_once(few, Repeated(self.loader.dataset, min(samples, len(batch.indices)))))

    def load_at_once(self, indices: Samples, dataset: Dataset[Any] | None = None) -> Any:
        """In this process."""
        single: DataLoader[Any] = DataLoader(
            self.loader.dataset if dataset is None else dataset,
            batch_sampler=[list(indices)],
            collate_fn=self.loader.collate_fn,
            generator=torch.Generator(),
        )
        return next(iter(single))


class OwnCursor:
    """A cursor in an epoch of the script's own loader."""

    def __init__(
        self,
        loader: OwnLoader,
        order: Sequence[GlobalBatch],
        divide: Callable[[GlobalBatch, int], BatchPlan],
        number: int = 0,
    ) -> None:
        """``order``: of the epoch. ``divide``: a batch among so many workers. ``number``: of the batch that comes first."""
        self.number = number  # of the batch that comes next
        self._loader = loader
        self._order = order
        self._divide = divide
        self._parts: Iterator[Any] = iter(())
        self._world = -1  # version of that whose parts these are

    def batches(self, workers: int) -> Iterator[BatchPlan]:
        for number in range(self.number, len(self._order)):
            yield self._divide(self._order[number], workers)

    def take(self, number: int, world: World) -> Any:
        """This worker's part of a batch, loaded. The parts of the next ones are loaded ahead, for as long as the world stays."""
        if (number, world.version) != (self.number, self._world):
            self.number, self._world = number, world.version
            parts = (plan.whole_run(world.rank) for plan in self.batches(world.size))
            first = next(parts)
            self._parts = self._loader.load(chain([first], parts), first.seed)
        sample = next(self._parts)
        self.number += 1
        return sample


Streams = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


def streams() -> Streams:
    """The states of the global generators of Python, NumPy and torch, also on GPUs, for this process; `RandomStreams.capture` is for others, and takes longer."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu.generator_states()


def restore_streams(captured: Streams) -> None:
    random.setstate(captured[0])
    np.random.set_state(captured[1])
    torch.set_rng_state(captured[2])
    gpu.restore_generators(captured[3])


@contextlib.contextmanager
def streams_apart() -> Iterator[None]:
    """Within, the generators are anybody's; afterwards they are as before."""
    before = streams()
    try:
        yield
    finally:
        restore_streams(before)


class RandomStreams:
    """The global generators of Python, NumPy and torch on the host, as one value that travels."""

    @staticmethod
    def capture() -> bytes:
        pythons, numpys, torchs, _ = streams()
        return pickle.dumps((pythons, numpys, torchs.numpy().tobytes()))

    @staticmethod
    def compared(captured: bytes) -> dict[str, Any]:
        """As `stream_parts`."""
        return stream_parts(*pickle.loads(captured))

    @staticmethod
    def restore(captured: bytes) -> None:
        pythons, numpys, torchs = pickle.loads(captured)
        restore_streams((pythons, numpys, torch.frombuffer(bytearray(torchs), dtype=torch.uint8), []))


def stream_parts(pythons: Any, numpys: Any, torchs: Any, *_: Any) -> dict[str, Any]:
    """States of the three global generators of the host as arrays, for `elasticdl.elastic.training.pieces.Piece.compared`."""
    states = {
        "python": np.array(pythons[1], np.int64),
        "numpy": np.append(numpys[1].astype(np.int64), numpys[2:4]),
        "torch": torchs if isinstance(torchs, torch.Tensor) else np.frombuffer(torchs, np.uint8),
    }
    return {"random": states}
