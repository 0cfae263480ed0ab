"""Every random draw of a step from one seed, so that a step made again draws the same.

What the model draws (dropout) comes from the seeds that each micro-batch is given (`step.Part`), what the data set draws
from the generators that are seeded here.
"""

from __future__ import annotations

import random

import numpy as np

from elasticdl.elastic.core.order import step_seed


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python's and NumPy's global generators for what ``rank`` draws in ``step``.

    Not TensorFlow's own: setting its seed throws all its cached operations away.
    """
    value = step_seed(seed, step, rank)
    random.seed(value)
    np.random.seed(value)
