"""The random draws of a step with PyTorch."""

from __future__ import annotations

import torch

from elasticdl.elastic.training import rng


def seed_step(seed: int, step: int, rank: int) -> None:
    """As `rng.seed_step`, torch's global generators included."""
    value = rng.seed_step(seed, step, rank)
    # Not torch.manual_seed: for each kind of device that is not in use it formats a stack trace, a millisecond a step.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
