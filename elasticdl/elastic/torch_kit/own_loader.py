"""The global batches of a script's own loader, and the part of each that a worker loads.

With them what its order is drawn from, and the stand-ins for batches that the job has made.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count, islice
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticdl.elastic.core.plan import BatchPlan, MicroBatch, Samples
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.torch_kit.refusals import of_loader, refuse
from elasticdl.elastic.torch_kit.tensors import HostCopy
from elasticdl.elastic.training.attributes import Noted
from elasticdl.elastic.training.data_facts import TRAINING, Source
from elasticdl.elastic.training.pieces import leaves_of

# A batch that stands in for one that the job has trained on already, for a script that must not notice.

# Batch norm needs two.
SAMPLES_LOADED = 2


class Repeated(Dataset[Any]):
    """Gives a few samples of a data set, repeated to so many: a script may take the largest losses of a batch."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset = dataset
        self._samples = samples

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        few = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        if type(few) is not list:
            return few
        return [*few, *(_copied(few[number % len(few)]) for number in range(len(few), self._samples))]


class StandIn:
    """A batch that is given again and again. The script may change it: then it is made anew."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample
        self._given: Any = None
        self._versions: list[int] = []

    def take(self) -> Any:
        if self._given is None or self._versions_now() != self._versions:
            self._given = map_tensors(torch.Tensor.clone, self._sample)
            self._versions = self._versions_now()
        return map_tensors(torch.Tensor.detach, self._given)  # of the same memory and count of changes

    def _versions_now(self) -> list[int]:
        leaves = [leaf for leaf in leaves_of(self._given) if isinstance(leaf, torch.Tensor)]
        return [0 if leaf.is_inference() else leaf._version for leaf in leaves]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with each tensor in it replaced by what ``function`` makes of the tensor."""
    return _pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _copied(sample: Any) -> Any:
    # A deep copy of a tensor is one of all that it is a view of: of the whole data set, perhaps.
    return _pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), sample
    )


# What the order of a loader's samples is drawn from, beside the global generators: generators and counts of its samplers.
#
# A worker that comes in the middle of an epoch draws that epoch's order as those did that were there.

HAD_SEED = ("",)  # in the place of a path
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Draws:
    """Of one loader. Generators are set where they are: a script may hold them, too."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._had_seed = getattr(loader, "_iterator", None) is not None  # the script has iterated over it before

    def draw_seed(self) -> None:
        """That of the loader's processes, as torch does: once if they stay, and else in each epoch."""
        loader = self._loader
        if not (self._had_seed and loader.num_workers and loader.persistent_workers):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self._had_seed = True

    def capture(self) -> bytes:
        """As it is now; to be called before an epoch is drawn."""
        found: dict[tuple[str, ...], Any] = {HAD_SEED: self._had_seed}
        for path, holder in self._holders():
            for name, value in vars(holder).items():
                if isinstance(
                    value, torch.Generator
                ):  # its state is a tensor, which would be pickled in another way each time
                    found[*path, name] = value.get_state().numpy().tobytes()
                elif type(value) in GENERATORS or (type(value) is int and not _is_torchs(holder)):
                    found[*path, name] = value
        return pickle.dumps(found)

    def restore(self, captured: bytes) -> None:
        """What another worker has captured, of its own loader."""
        found = pickle.loads(captured)
        self._had_seed = found.pop(HAD_SEED, self._had_seed)
        holders = dict(self._holders())
        for path, value in found.items():
            if (holder := holders.get(path[:-1])) is not None:
                name = path[-1]
                vars(holder)[name] = _as(vars(holder).get(name), value)

    def _holders(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The loader and its samplers, each with the names that lead to it. What several have comes once."""
        seen = {id(self._loader.dataset)}
        pending: list[tuple[tuple[str, ...], Any]] = [((), self._loader)]
        while pending:
            path, holder = pending.pop(0)
            if id(holder) not in seen:
                seen.add(id(holder))
                yield path, holder
                names = vars(holder) if path else ("sampler", "batch_sampler")
                pending += [((*path, name), each) for name in names if _is_sampler(each := getattr(holder, name))]


def _as(own: Any, value: Any) -> Any:
    """``value``, as `Draws` has captured it, in the place of ``own``: the script may hold a generator, too."""
    if isinstance(value, bytes):
        generator = own if isinstance(own, torch.Generator) else torch.Generator()
        return generator.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))
    return value


def _is_torchs(holder: Any) -> bool:
    """What it holds it was given."""
    return type(holder).__module__.startswith("torch.")


def _is_sampler(value: Any) -> bool:
    """Or what a sampler of one's own draws from."""
    if isinstance(value, type | Dataset | torch.Tensor | torch.nn.Module):
        return False
    return isinstance(value, Sampler) or (hasattr(type(value), "__iter__") and hasattr(value, "__dict__"))


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


def _contents(tensor: torch.Tensor) -> tuple[int, int]:
    """As long as the tensor is kept, these differ from those of any other, and after a change in place."""
    return tensor.data_ptr(), tensor._version


@dataclass(slots=True)
class OpenBatch:
    """A batch that the script has been given, of whose step the parameters have not changed yet."""

    batch: GlobalBatch
    part: MicroBatch
    sample: Any = None
    backwards: int = 0  # backward passes that were made of it
    most: int = 0  # samples of the part when it was given, which are those of one pass
    noted: Noted | None = None  # in attributes, before the script has made anything of it
    losses: list[tuple[HostCopy, float]] = field(default_factory=list)  # of its passes, and how each is weighed
    begun: tuple[tuple[int, int], HostCopy] | None = None  # of the pass that is being made: which loss, and its copy

    def begin_loss(self, loss: torch.Tensor) -> None:
        """A pass is made of this loss next. It comes to the host while the device is on that pass, which nobody has to wait for."""
        self.begun = _contents(loss), HostCopy(loss.detach().sum())

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """A pass was made, or is made next, of this loss."""
        of, copy = self.begun or (None, None)
        self.begun = None
        if copy is None or of != _contents(loss):
            copy = HostCopy(loss.detach().sum())
        self.losses.append((copy, weight))

    @property
    def objective(self) -> float:
        """The weighed sum of the losses of its passes."""
        return sum(float(copy.wait()) * weight for copy, weight in self.losses)

    def begin_again(self) -> None:
        """Its gradients are made again, of another part."""
        self.losses.clear()

    def forget(self) -> None:
        """Its step is made: what the script has computed of it may go."""
        self.sample = None


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Samples of a batch as the script's loader gives them; ``weight``: their part of the mean over the batch."""

    content: Any
    weight: float
    samples: int


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
        self.source = replace(Source.of(TRAINING, loader.dataset), batch=loader.batch_size)

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


class PartsAhead:
    """This worker's parts of the batches of an epoch, loaded ahead for as long as the world stays."""

    def __init__(
        self, loader: OwnLoader, order: Sequence[GlobalBatch], part_of: Callable[[GlobalBatch], MicroBatch]
    ) -> None:
        """``order``: of the epoch. ``part_of``: what this worker has of a batch in the present world."""
        self._loader = loader
        self._order = order
        self._part_of = part_of
        self._parts: Iterator[Any] = iter(())
        # The number of the batch that comes next, and the version of the world whose parts these are.
        self._next = (-1, -1)

    def take(self, number: int, world: World) -> Any:
        """This worker's part of a batch."""
        if (number, world.version) != self._next:
            parts = (self._part_of(batch) for batch in islice(self._order, number, None))
            first = next(parts)
            self._parts = self._loader.load(chain([first], parts), first.seed)
        sample = next(self._parts)
        self._next = number + 1, world.version
        return sample
