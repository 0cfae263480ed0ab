"""What the peers' loops share: options, and the batch of a step for a rank."""

from __future__ import annotations

import argparse

import torch

from benchmarks.loops.options import make_parser
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset

POOL_BATCHES = 64


def parse(replica: bool = False) -> argparse.Namespace:
    parser = make_parser()
    if replica:
        parser.add_argument("--replica", type=int, required=True)
    return parser.parse_args()


class Batches:
    """The batch of each step and rank, out of a pool in memory."""

    def __init__(self, model: str) -> None:
        size = worker_batch(model)
        images, labels = make_dataset(model, POOL_BATCHES * size).tensors
        self._pairs = list(zip(torch.split(images, size), torch.split(labels, size), strict=True))

    def of(self, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pairs[(step * size + rank) % POOL_BATCHES]
