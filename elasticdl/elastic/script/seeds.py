"""Random numbers of Python and NumPy, which scripts draw from to split and shuffle their data: the same on all workers.

They, and those of PyTorch and TensorFlow, are seeded when a worker's Python starts (`sitecustomize`). A seed of the script's own stays.
"""

from __future__ import annotations

import random

import numpy as np

SEED = 0  # at the start


def seed_if_unused(seed: int) -> None:
    """Unless the script has drawn from them, or has seeded them: then they stay."""
    if random.getstate() == random.Random(SEED).getstate():
        random.seed(seed)
    kind, key, *rest = np.random.get_state()
    first_kind, first_key, *first_rest = np.random.RandomState(SEED).get_state()
    if (kind, rest) == (first_kind, first_rest) and np.array_equal(key, first_key):
        np.random.seed(seed % 2**32)
