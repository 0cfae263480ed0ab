"""Buffers of a model that a forward pass sets to what is not to be put together from the parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from elasticdl.elastic.training.attributes import is_scripts_own
from elasticdl.elastic.training.divisible import Passes, why_not_averaged, why_not_counted


def couplings_of_buffers(model: torch.nn.Module, inputs: Any) -> Iterator[str]:
    """A line for each, of the modules that are no package's. ``inputs``: some samples. Buffers are left as a pass leaves them."""
    kinds: list[tuple[Any, Any]] = [(module, type(module)) for module in model.modules()]
    own = {id(module) for module, kind in kinds if is_scripts_own(kind)}
    probed = [
        (f"{path}.{name}".lstrip("."), module, name)
        for path, module in model.named_modules()
        if id(module) in own
        for name, buffer in module.named_buffers(recurse=False)
        if not (buffer.is_complex() or buffer.dtype == torch.bool) and name not in module._non_persistent_buffers_set
    ]
    leaves = [leaf for leaf in _pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    size = min(map(len, leaves), default=0) // 2
    if not probed or not size or not model.training:
        return
    begun = [(buffer, buffer.clone()) for buffer in model.buffers()]
    first, second = list(range(size)), list(range(size, 2 * size))
    seeds = ((first, 0), (first, 1), (second, 0), (first + first, 0), (first + second, 0))
    values = [[_host(getattr(module, name)) for _, module, name in probed]]
    for rows, seed in seeds:
        for buffer, value in begun:
            buffer.copy_(value)
        torch.manual_seed(seed)
        model(_pytree.tree_map(lambda leaf, rows=rows: _picked(leaf, rows), inputs))
        values.append([_host(getattr(module, name)) for _, module, name in probed])
    for (title, module, name), *each in zip(probed, *values, strict=True):
        judge = why_not_averaged if getattr(module, name).is_floating_point() else why_not_counted
        yield judge(f"the buffer {title}", Passes(*each))


def _picked(leaf: Any, rows: list[int]) -> Any:
    return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf


def _host(buffer: torch.Tensor) -> Any:
    return np.array(buffer.detach().cpu().to(torch.float64))
