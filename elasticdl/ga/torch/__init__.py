"""Gradient accumulation for PyTorch; see `elasticdl.ga.torch.optim`."""

from elasticdl.triton_first import require_triton_first

require_triton_first("elasticdl.ga.torch")

from elasticdl.ga.torch import optim

__all__ = ["optim"]
