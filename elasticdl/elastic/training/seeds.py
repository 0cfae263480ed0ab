"""Random numbers of Python and NumPy, which scripts draw from to split and shuffle their data: the same on all workers.

They, and those of PyTorch and TensorFlow, are seeded when a worker's Python starts (`sitecustomize`). A seed of the script's own stays.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

SEED = 0  # at the start
SEEDED = "ELASTICDL_SEEDED"  # set where they were


@contextlib.contextmanager
def kept_streams(*, pythons: bool = True, numpys: bool = True) -> Iterator[None]:
    """Within, the generators are anybody's; afterwards those that are asked for are as before."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        if pythons:
            random.setstate(states[0])
        if numpys:
            np.random.set_state(states[1])


def used_streams_kept() -> AbstractContextManager[None]:
    """Within, the generators may be seeded; afterwards those that the script of a worker has seeded or drawn from are as before."""
    seeded = SEEDED in os.environ  # else nobody knows what has been done to Python's
    return kept_streams(pythons=seeded and _python_is_used(), numpys=seeded and _numpy_is_used())


def seed_if_unused(seed: int) -> None:
    """Unless the script has drawn from them, or has seeded them: then they stay."""
    if not _python_is_used():
        random.seed(seed)
    if not _numpy_is_used():
        np.random.seed(seed % 2**32)


def _python_is_used() -> bool:
    return random.getstate() != random.Random(SEED).getstate()


def _numpy_is_used() -> bool:
    kind, key, *rest = np.random.get_state()
    first_kind, first_key, *first_rest = np.random.RandomState(SEED).get_state()
    return (kind, rest) != (first_kind, first_rest) or not np.array_equal(key, first_key)
