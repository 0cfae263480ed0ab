"""Buffers of a model that a forward pass sets to what is not to be put together from the parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from elasticdl.common.tree import leaves
from elasticdl.elastic.training.attributes import is_scripts_own
from elasticdl.elastic.training.divisible import Passes, rows_of, why_not_averaged, why_not_counted


def couplings_of_buffers(model: torch.nn.Module, inputs: Any) -> Iterator[str]:
    """A line for each, of the modules that are no package's. ``inputs``: some samples. Buffers are afterwards as before."""
    kinds: list[tuple[Any, Any]] = [(module, type(module)) for module in model.modules()]
    own = {id(module) for module, kind in kinds if is_scripts_own(kind)}
    probed = [
        (f"{path}.{name}".lstrip("."), module, name)
        for path, module in model.named_modules()
        if id(module) in own
        for name, buffer in module.named_buffers(recurse=False)
        if not (buffer.is_complex() or buffer.dtype == torch.bool) and name not in module._non_persistent_buffers_set
    ]
    size = min((len(leaf) for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), default=0) // 2
    if not probed or not size or not model.training:
        return
    begun = [
        (owner, key, buffer, buffer.clone())
        for owner in model.modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None
    ]
    first, second = list(range(size)), list(range(size, 2 * size))
    seeds = ((first, 0), (first, 1), (second, 0), (first + first, 0), (first + second, 0))
    values = [[_host(getattr(module, name)) for _, module, name in probed]]
    for rows, seed in seeds:
        torch.manual_seed(seed)
        try:
            model(rows_of(inputs, rows))
        except Exception:  # noqa: BLE001 - batch norm takes no single sample; what raises in training as well is told there
            return
        else:
            values.append([_host(getattr(module, name)) for _, module, name in probed])
        finally:
            for owner, key, buffer, value in begun:  # a pass may have put another tensor there
                owner._buffers[key] = buffer
                buffer.copy_(value)
    for (title, module, name), *each in zip(probed, *values, strict=True):
        judge = why_not_averaged if getattr(module, name).is_floating_point() else why_not_counted
        yield judge(f"the buffer {title}", Passes(*each))


def _host(buffer: torch.Tensor) -> Any:
    return np.array(buffer.detach().cpu().to(torch.float64))
