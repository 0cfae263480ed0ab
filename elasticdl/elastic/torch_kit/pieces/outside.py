"""What trains and is in no ``state_dict`` of the model: parameters that only the optimizer has, and buffers that are not persistent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.pieces.tensors import Modules, copy_tensor
from elasticdl.elastic.torch_kit.reduction.named import NamedBuffers, is_alike, modules_of
from elasticdl.elastic.training.pieces import Trained


class Outside(Trained):
    """It travels beside the model."""

    name = "outside"
    copy_tensor = staticmethod(copy_tensor)

    def __init__(self, modules: Modules, parameters: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
        """``parameters``: those of the optimizer."""
        self._modules = modules
        self._parameters = parameters

    def dump(self) -> dict[str, Any]:
        """Empty if there is nothing."""
        modules = self._modules()
        outside = [each.detach() for each in outside_parameters(modules, self._parameters())]
        caches = {each.name_in(modules): each.tensor for each in NamedBuffers(modules).find() if each.is_cache}
        return {**({"parameters": outside} if outside else {}), **({"buffers": caches} if caches else {})}

    @torch.no_grad()
    def load(self, dumped: dict[str, Any]) -> None:
        """Raises:
        UserError: the optimizer has other parameters.
        """
        modules = self._modules()
        outside, theirs = outside_parameters(modules, self._parameters()), dumped.get("parameters", [])
        own, others = ([tuple(each.shape) for each in some] for some in (outside, theirs))
        if own != others:
            raise UserError(
                f"the optimizer has parameters that are not the model's, here of the shapes {own}, and of {others} where the state comes "
                "from: make the same on every worker"
            )
        for parameter, value in zip(outside, theirs, strict=True):
            parameter.copy_(value)
        caches = dumped.get("buffers", {})
        for named in NamedBuffers(modules).find() if caches else ():
            value, now = caches.get(named.name_in(modules)) if named.is_cache else None, named.tensor
            # Where the shapes differ each worker has its own.
            if value is not None and now is not None and is_alike(now, value.to(now.device)):
                now.copy_(value)

    def missing(self) -> None:
        self.load({})

    def compared(self) -> dict[str, Any]:
        """Buffers that are not persistent may be caches of each worker's own."""
        outside = outside_parameters(self._modules(), self._parameters())
        return {self.name: outside} if outside else {}


def outside_parameters(
    modules: Sequence[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    """Those that the optimizer has and none of the modules."""
    within = {id(each) for module in modules_of(modules) for each in module._parameters.values()}
    return list({id(each): each for each in parameters if id(each) not in within}.values())
