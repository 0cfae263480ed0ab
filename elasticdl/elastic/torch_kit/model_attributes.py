"""Whose attributes are sent to workers that come later, with PyTorch: those of modules, and of callbacks that have no state of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticdl.elastic.torch_kit.tensors import host_array
from elasticdl.elastic.training.attributes import Arrays, Holder, is_scripts_own

OF_A_MODULE = frozenset(vars(torch.nn.Module()))  # what each has of torch


def holders_of_modules(roots: Sequence[torch.nn.Module], foreign: AbstractSet[str]) -> Iterator[Holder]:
    """Within a step those of the script's own classes may change, and are read. ``foreign``: attributes that are a library's."""
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            kind: Any = type(module)
            title = f"{kind.__name__} {path}".rstrip()
            is_own = not path or is_scripts_own(kind)
            remedy = "give it get_extra_state and set_extra_state"
            yield Holder(f"{number}:{path}", title, module, OF_A_MODULE | foreign, is_own, True, remedy)


def holders_of_callbacks(
    callbacks: Iterable[Any],
    packages: tuple[str, ...],
    remedy: str = "keep it as plain data",
    *,
    is_noted: bool = True,
) -> Iterator[Holder]:
    """One for each callback of the script's own. Callbacks of these packages have a state of their own, or need none."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    for callback in callbacks:
        kind: Any = type(callback)
        if kind.__module__.partition(".")[0] not in packages:
            name = f"callback {kind.__qualname__} {next(numbers[kind.__qualname__])}"
            yield Holder(name, f"the callback {kind.__name__}", callback, frozenset(), is_noted, remedy=remedy)


def _is_tensor(value: Any) -> bool:
    """One that is sent; those that are trained are the state's."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.is_leaf and value.requires_grad)
        and not is_lazy(value)
    )


def _fill(present: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if (present.shape, present.dtype) != (value.shape, value.dtype):
        return value.clone()
    present.data.copy_(value)  # a backward pass that is yet to come has noted the versions
    return present


TENSORS = Arrays(
    _is_tensor,
    lambda tensor: tensor.detach().clone(),
    _fill,
    host_array,
    (
        *(torch.optim.Optimizer, LRScheduler, Dataset, DataLoader, Sampler, torch.nn.Parameter),
        *(torch.dtype, torch.device, torch.Size),
    ),
    torch.Tensor.detach,
)
