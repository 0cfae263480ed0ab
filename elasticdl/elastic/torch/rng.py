"""Every random draw of a step from one seed, so that a step made again draws the same."""

from __future__ import annotations

import random

import numpy as np
import torch

from elasticdl.elastic.core.order import step_seed


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's global generators for what ``rank`` draws in ``step``."""
    value = step_seed(seed, step, rank)
    random.seed(value)
    np.random.seed(value)
    # Not torch.manual_seed: for each kind of device that is not in use it formats a stack trace, a millisecond a step.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
