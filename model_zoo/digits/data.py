"""The digits, split once and for all, so that accuracies can be compared between runs and frameworks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import numpy as np
from numpy.typing import NDArray

ONE_OF = 5  # is held out: 360
SPLIT_SEED = 2024
BRIGHTEST = 16.0  # pixels are 0..16


def read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """All 1,797 images (N x 64, from 0 to 16) and labels, as ``sklearn.datasets.load_digits`` gives them.

    From scikit-learn's file, but without scikit-learn: importing it takes as long as importing PyTorch.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    except PackageNotFoundError:
        raise ValueError("the digits come with scikit-learn, which is missing: pip install scikit-learn") from None
    rows = np.loadtxt(str(file), delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


def read_split(mode: str, path: str) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Images (N x 8 x 8, from 0 to 1) and labels 0..9; 1,437 for training, 360 for evaluation, as many of each digit.

    Raises:
        ValueError: `mode` is unknown, or a path is given although the digits have none.
    """
    if mode not in ("training", "evaluation", "prediction"):
        raise ValueError(f"dataset mode {mode!r}: expected 'training', 'evaluation' or 'prediction'")
    if path:
        raise ValueError(f"{path}: the digits come with scikit-learn; leave the path of the {mode} data out")
    images, labels = read_digits()
    by_digit = np.lexsort((np.random.default_rng(SPLIT_SEED).random(len(labels)), labels))
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[by_digit[::ONE_OF]] = True
    chosen = ~held_out if mode == "training" else held_out
    return (images[chosen].reshape(-1, 8, 8) / BRIGHTEST).astype(np.float32), labels[chosen]
