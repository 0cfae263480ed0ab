"""What the order of a loader's samples is drawn from, beside the global generators: generators and counts of its samplers.

A worker that comes in the middle of an epoch draws that epoch's order as those did that were there.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.training.data_facts import TRAINING, Source

# Of a loader, where a sampler or a generator may be.
OF_LOADERS = ("generator", "sampler", "batch_sampler")
SIMPLE = (bool, int, float, str, type(None))
WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
HAD_SEED, DATA = ("",), ("", "")  # in the place of a path
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True, slots=True)
class TorchGenerator:
    """The state of one. A tensor would be pickled in another way each time."""

    state: bytes


@dataclass(frozen=True, slots=True)
class TorchNumbers:
    """A tensor, for the same reason."""

    values: npt.NDArray[Any]


class Draws:
    """Of one loader. Generators are set where they are: a script may hold them, too."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.data = Source.of(TRAINING, loader.dataset)  # as it is at first
        self._had_seed = getattr(loader, "_iterator", None) is not None  # the script has iterated over it before
        # Floating-point numbers travel if they have become others: a sampler may hold many.
        self._at_first = {path: _checksum(value) for path, value in self._places() if _is_floating(value)}

    def draw_seed(self) -> None:
        """That of the loader's processes, as torch does: once if they stay, and else in each epoch."""
        loader = self._loader
        if not (self._had_seed and loader.num_workers and loader.persistent_workers):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self._had_seed = True

    def capture(self) -> bytes:
        """As it is now; to be called before an epoch is drawn."""
        found: dict[tuple[str, ...], Any] = {HAD_SEED: self._had_seed}
        moved = Source.of(TRAINING, self._loader.dataset).moved_since(self.data)
        if moved.columns:
            found[DATA] = moved
        for path, value in self._places():
            if _is_floating(value) and self._at_first.get(path) == _checksum(value):
                continue
            if isinstance(value, torch.Generator):
                value = TorchGenerator(value.get_state().numpy().tobytes())
            elif isinstance(value, torch.Tensor):
                value = TorchNumbers(value.detach().cpu().numpy())
            found[path] = value
        return pickle.dumps(found)

    def restore(self, captured: bytes) -> None:
        """What another worker has captured, of its own loader."""
        found = pickle.loads(captured)
        self._had_seed = found.pop(HAD_SEED, self._had_seed)
        found.pop(DATA, None)
        for path, value in found.items():
            holder: Any = self._loader
            for name in path[:-1]:
                holder = getattr(holder, name, None)
            put = _put(getattr(holder, path[-1], None), value)
            if holder is not self._loader and hasattr(holder, "__dict__"):
                vars(holder)[path[-1]] = put

    def require_data(self, captured: bytes) -> None:
        """What others have ``captured``, where this worker begins to train.

        Raises:
            UserError: they have put into their data what this worker has not.
        """
        theirs = pickle.loads(captured).get(DATA)
        if theirs is not None and (found := Source.of(TRAINING, self._loader.dataset).differs(theirs)):
            raise UserError(
                f"refused: in the loop the script has changed its data, and {found}: what it has made of the model (such as labels) while this "
                "worker was catching up is not the job's. Give elastic.prepare() what it makes, as an object with state_dict, or make it of the data alone"
            )

    def _places(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The names that lead to a value, and the value. What several have comes once."""
        seen = {id(self._loader.dataset)}
        pending: list[tuple[tuple[str, ...], Any, Any]] = [
            ((name,), self._loader, getattr(self._loader, name, None)) for name in OF_LOADERS
        ]
        while pending:
            path, holder, value = pending.pop(0)
            if type(value) in SIMPLE:
                if len(path) > 1 and not type(holder).__module__.startswith(
                    "torch."
                ):  # what torch's hold was given them
                    yield path, value
                continue
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in GENERATORS or _is_order(value):
                yield path, value
            elif _is_sampler(value):
                pending += [((*path, name), value, each) for name, each in vars(value).items()]


def _put(own: Any, value: Any) -> Any:
    """``value``, in the place of ``own``, or within it."""
    if isinstance(value, TorchGenerator):
        generator = own if isinstance(own, torch.Generator) else torch.Generator()
        return generator.set_state(torch.frombuffer(bytearray(value.state), dtype=torch.uint8))
    if isinstance(value, TorchNumbers):
        return torch.from_numpy(value.values.copy())
    if type(own) is not type(value):
        return value
    if isinstance(value, np.random.Generator):
        own.bit_generator.state = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        own.set_state(value.get_state())
    elif isinstance(value, random.Random):
        own.setstate(value.getstate())
    elif isinstance(value, list):
        own[:] = value
    else:
        return value
    return own


def _is_order(value: Any) -> bool:
    """Numbers, such as those of samples that are shuffled where they are, or by which samples are drawn."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind in "iubf")
    if isinstance(value, torch.Tensor):
        return not value.is_complex() and value.dtype not in WITHOUT_NUMPY and value.layout is torch.strided
    return type(value) is list and all(type(each) in (int, float) for each in value)


def _is_floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind == "f")
    return type(value) is list and any(type(each) is float for each in value)


def _checksum(value: Any) -> int:
    """Of floating-point numbers."""
    numbers = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    return zlib.crc32(np.ascontiguousarray(numbers).tobytes())


def _is_sampler(value: Any) -> bool:
    """Or what a sampler of one's own draws from."""
    if isinstance(value, Sampler):
        return True
    if isinstance(value, type | Dataset | torch.Tensor | torch.nn.Module):
        return False
    return hasattr(type(value), "__iter__") and hasattr(value, "__dict__")
