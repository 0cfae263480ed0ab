"""Gradient accumulation for PyTorch; see `elasticdl.ga.torch.optim`."""

from elasticdl.ga.torch import optim

__all__ = ["optim"]
