"""The digits, split once and for all, so that accuracies can be compared between runs and frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HELD_OUT = 360
SPLIT_SEED = 2024
BRIGHTEST = 16.0  # pixels are 0..16


def read_split(mode: str, path: str) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Images (N x 8 x 8, from 0 to 1) and labels 0..9; 1,437 for training, 360 for evaluation.

    Raises:
        ValueError: `mode` is unknown, or a path is given although the digits have none.
    """
    if mode not in ("training", "evaluation"):
        raise ValueError(f"dataset mode {mode!r}: expected 'training' or 'evaluation'")
    if path:
        raise ValueError(f"{path}: the digits come with scikit-learn; leave the path of the {mode} data out")
    digits = load_digits()
    training, evaluation = train_test_split(
        range(len(digits.target)), test_size=HELD_OUT, stratify=digits.target, random_state=SPLIT_SEED
    )
    chosen = training if mode == "training" else evaluation
    return (digits.images[chosen] / BRIGHTEST).astype(np.float32), digits.target[chosen].astype(np.int64)
