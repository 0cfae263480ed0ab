"""scikit-learn's digits without scikit-learn, which takes as long to import as a framework; see `startup`."""

from importlib.metadata import distribution

import numpy as np


def read_digits():
    """1,797 images (N x 64, from 0 to 1) and labels 0..9."""
    rows = np.loadtxt(
        str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")), delimiter=","
    )
    return (rows[:, :-1] / 16).astype(np.float32), rows[:, -1].astype(np.int64)
