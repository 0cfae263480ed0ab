"""Every random draw of a step from one seed, so that a step made again draws the same."""

from __future__ import annotations

import random

import numpy as np

from elasticdl.elastic.core.progress import step_seed


def seed_step(seed: int, step: int, rank: int) -> int:
    """Seed Python's and NumPy's global generators for what ``rank`` draws in ``step``; returns the seed, 32 bits."""
    value = step_seed(seed, step, rank)
    random.seed(value)
    np.random.seed(value)
    return value
