"""Random numbers of Python and NumPy, which scripts draw from to split and shuffle their data: the same on all workers.

They, and those of PyTorch and TensorFlow, are seeded when a worker's Python starts (`sitecustomize`). A seed of the script's own stays.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

SEED = 0  # at the start


@contextlib.contextmanager
def kept_streams() -> Iterator[None]:
    """Within, the generators are anybody's; afterwards they are as before."""
    python, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


def seed_if_unused(seed: int) -> None:
    """Unless the script has drawn from them, or has seeded them: then they stay."""
    if random.getstate() == random.Random(SEED).getstate():
        random.seed(seed)
    kind, key, *rest = np.random.get_state()
    first_kind, first_key, *first_rest = np.random.RandomState(SEED).get_state()
    if (kind, rest) == (first_kind, first_rest) and np.array_equal(key, first_key):
        np.random.seed(seed % 2**32)
