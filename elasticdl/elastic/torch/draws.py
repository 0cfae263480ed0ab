"""What the order of a loader's samples is drawn from, beside the global generators: generators and counts of its samplers.

A worker that comes in the middle of an epoch draws that epoch's order as those did that were there.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

# Of a loader, where a sampler or a generator may be.
OF_LOADERS = ("generator", "sampler", "batch_sampler")
SIMPLE = (bool, int, float, str, type(None))
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True, slots=True)
class TorchGenerator:
    """The state of one. A tensor would be pickled in another way each time."""

    state: bytes


class Draws:
    """Of one loader. Generators are set where they are: a script may hold them, too."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def capture(self) -> bytes:
        """As it is now; to be called before an epoch is drawn."""
        found = {}
        for path, value in self._places():
            is_torchs = isinstance(value, torch.Generator)
            found[path] = TorchGenerator(value.get_state().numpy().tobytes()) if is_torchs else value
        return pickle.dumps(found)

    def restore(self, captured: bytes) -> None:
        """What another worker has captured, of its own loader."""
        for path, value in pickle.loads(captured).items():
            holder: Any = self._loader
            for name in path[:-1]:
                holder = getattr(holder, name, None)
            put = _put(getattr(holder, path[-1], None), value)
            if holder is not self._loader and hasattr(holder, "__dict__"):
                vars(holder)[path[-1]] = put

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
    """Whole numbers, such as those of samples that are shuffled where they are."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind in "iub")
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return type(value) is list and all(type(each) is int for each in value)


def _is_sampler(value: Any) -> bool:
    """Or what a sampler of one's own draws from."""
    if isinstance(value, Sampler):
        return True
    if isinstance(value, type | Dataset | torch.Tensor | torch.nn.Module):
        return False
    return hasattr(type(value), "__iter__") and hasattr(value, "__dict__")
