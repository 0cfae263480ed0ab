"""The seed of PyTorch's generators, from which a script's model is drawn."""

from __future__ import annotations

import torch

from elasticdl.elastic.training.seeds import SEED

LEAST_DRAWN = 2**32  # of what torch itself draws at its start, of 64 bits; people give less, as NumPy takes no more


def seed_torch(seed: int) -> None:
    """Unless the script has done so."""
    present = torch.initial_seed()
    if present == SEED or present >= LEAST_DRAWN:
        torch.manual_seed(seed)
