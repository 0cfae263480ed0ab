"""What trains and is in no ``state_dict`` of the model: parameters that only the optimizer has, and buffers that are not persistent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.reduction.named import NamedBuffers, is_alike, modules_of


def dump_outside(modules: Sequence[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]) -> dict[str, Any]:
    """``parameters``: those of the optimizer. Tensors by reference; empty if there is nothing."""
    outside = [each.detach() for each in outside_parameters(modules, parameters)]
    caches = {each.name_in(modules): each.tensor for each in NamedBuffers(modules).find() if each.is_cache}
    return {**({"parameters": outside} if outside else {}), **({"buffers": caches} if caches else {})}


@torch.no_grad()
def load_outside(
    saved: dict[str, Any], modules: Sequence[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]
) -> None:
    """Raises:
    UserError: the optimizer has other parameters.
    """
    outside, theirs = outside_parameters(modules, parameters), saved.get("parameters", [])
    own, others = ([tuple(each.shape) for each in some] for some in (outside, theirs))
    if own != others:
        raise UserError(
            f"the optimizer has parameters that are not the model's, here of the shapes {own}, and of {others} where the state comes "
            "from: make the same on every worker"
        )
    for parameter, value in zip(outside, theirs, strict=True):
        parameter.copy_(value)
    caches = saved.get("buffers", {})
    for named in NamedBuffers(modules).find() if caches else ():
        value, now = caches.get(named.name_in(modules)) if named.is_cache else None, named.tensor
        if (
            value is not None and now is not None and is_alike(now, value.to(now.device))
        ):  # else each worker has its own
            now.copy_(value)


def outside_parameters(
    modules: Sequence[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    """Those that the optimizer has and none of the modules."""
    within = {id(each) for module in modules_of(modules) for each in module._parameters.values()}
    return list({id(each): each for each in parameters if id(each) not in within}.values())
