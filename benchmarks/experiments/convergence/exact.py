"""Gradients whose sum does not depend on the order in which they are added.

Floating-point addition is not associative: cut among three workers instead of two, the same micro-batches give a sum that
differs in its last bit, and training makes any difference grow. To tell that apart from a different *computation*, each
micro-batch's gradient is brought to a multiple of ``GRID``, within ``LIMIT``. Then every sum of up to ``TERMS`` of them
is exact in single precision, so workers that make the same steps make them to the bit.
"""

from __future__ import annotations

import torch

MANTISSA = 24  # bits of a float32
TERMS = 16
GRID = 2.0**-20
LIMIT = GRID * 2**MANTISSA / TERMS  # each is a part of the mean over the batch: gradients never come near


def add_exactly(model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose gradients are rounded before they are accumulated."""
    for parameter in model.parameters():
        parameter.register_hook(_on_grid)  # type: ignore[no-untyped-call]
    return model


def _on_grid(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient / GRID).round_().mul_(GRID).clamp_(-LIMIT, LIMIT)
