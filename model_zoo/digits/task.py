"""What the PyTorch models of this folder share: the data, the loss and the metric."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from .data import read_split


def dataset(mode: str, path: str) -> TensorDataset:
    """Samples are a 1x8x8 float image and a label 0..9; 1,437 for training, 360 for evaluation.

    Raises:
        ValueError: `mode` is unknown, or a path is given although the digits have none.
    """
    images, labels = read_split(mode, path)
    return TensorDataset(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels))


def loss(labels: Tensor, predictions: Tensor) -> Tensor:
    return functional.cross_entropy(predictions, labels)


def eval_metrics_fn() -> dict[str, Callable[[Tensor, Tensor], float]]:
    return {"accuracy": accuracy}


def accuracy(labels: Tensor, outputs: Tensor) -> float:
    """The share of samples whose largest output is at the label."""
    hits = torch.as_tensor(outputs).argmax(dim=1) == torch.as_tensor(labels)
    return hits.double().mean().item()
