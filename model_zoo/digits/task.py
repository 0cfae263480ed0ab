"""What the models of this folder share: the data, the loss and the metric.

The 1,797 digits come with scikit-learn. The split is fixed, so that accuracies can be compared between runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

HELD_OUT = 360
SPLIT_SEED = 2024
BRIGHTEST = 16.0  # pixels are 0..16


def dataset(mode: str, path: str) -> TensorDataset:
    """Samples are a 1x8x8 float image and a label 0..9; 1,437 for training, 360 for evaluation.

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
    images = torch.tensor(digits.images[chosen], dtype=torch.float32).unsqueeze(1) / BRIGHTEST
    return TensorDataset(images, torch.tensor(digits.target[chosen], dtype=torch.int64))


def loss(labels: Tensor, predictions: Tensor) -> Tensor:
    return functional.cross_entropy(predictions, labels)


def eval_metrics_fn() -> dict[str, Callable[[Tensor, Tensor], float]]:
    return {"accuracy": accuracy}


def accuracy(labels: Tensor, outputs: Tensor) -> float:
    """The share of samples whose largest output is at the label."""
    hits = torch.as_tensor(outputs).argmax(dim=1) == torch.as_tensor(labels)
    return hits.double().mean().item()
