"""What a worker does that has come later, on its script's way to where the job stands: as little as the script allows.

The others wait for it meanwhile. So the model is run on a stand-in for a batch once, and then gives the same answer again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from elasticdl.elastic.torch.tape import SIMPLE
from elasticdl.elastic.torch_kit.data.stand_in import map_tensors
from elasticdl.elastic.training.tree import leaves as leaves_of


class ModelFromMemory:
    """A model that is called with the same shapes again and again, and whose answers don't matter.

    It is run each time if it leaves elsewhere what a loss is made of as well: in an attribute, or by a hook.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._forward: Any = None  # the model's own, while this one takes its place
        self._was_own = False  # an attribute of the model itself, and not of its class
        self._described: Any = None  # what it was called with
        self._answer: Any = None  # without what it was computed by
        self._gives_all: dict[bool, bool] = {}  # by its answer, in training and else
        self._given: list[torch.Tensor] = []  # last
        self._began = 0.0
        self.batches = 0

    @property
    def seconds(self) -> float:
        """Since it has begun."""
        return time.monotonic() - self._began if self.batches else 0.0

    def begin_batch(self) -> None:
        self.batches += 1
        if self._forward is None:
            self._began = time.monotonic()
            self._was_own = "forward" in vars(self._model)
            self._forward = self._model.forward
            self._model.forward = _InPlaceOf(self._forward, self._answer_again)

    def end(self) -> list[torch.Tensor]:
        """The model is its own again. Returns its last answer, by which a script may show that it has kept it."""
        given, self._given = self._given, []
        if self._forward is None:
            return given
        if self._was_own:
            self._model.forward = self._forward
        else:
            del self._model.forward
        self._forward = self._described = self._answer = None
        self.batches = 0
        return given

    def _answer_again(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None:
            return type(self._model).forward(self._model, *args, **kwargs)
        answer = self._answer_to(args, kwargs)
        self._given = [leaf.detach() for leaf in leaves_of(answer) if isinstance(leaf, torch.Tensor)]
        return answer

    def _answer_to(self, args: Any, kwargs: Any) -> Any:
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        described = (structure, shapes, self._model.training, torch.is_grad_enabled())
        if self._described is not None and described == self._described:
            return self._copy_of_answer(leaves)
        if not self._gives_all.get(self._model.training, True):
            return self._forward(*args, **kwargs)
        answer = self._forward(*args, **kwargs)
        if not all(isinstance(leaf, (torch.Tensor, *SIMPLE)) for leaf in leaves_of((answer, shapes))):
            return answer
        if torch.is_grad_enabled() and self._model.training not in self._gives_all:
            self._gives_all[self._model.training] = not _leaves_more(self._model)
        if not self._gives_all.get(self._model.training, True):
            return answer
        self._described, self._answer = described, map_tensors(_without_graph, answer)
        return self._copy_of_answer(leaves)

    def _copy_of_answer(self, given: list[Any]) -> Any:
        """A gradient of zero flows to all that may have one, and so does one of that gradient: a script looks at it, or a GradScaler."""
        flow = [each for each in (*self._model.parameters(), *given) if isinstance(each, torch.Tensor)]
        means = [each.mean() for each in flow if each.requires_grad and each.numel()]

        def copied(leaf: torch.Tensor) -> torch.Tensor:
            if not means or not leaf.requires_grad:
                return leaf.detach().clone()
            # A sine is finite, and has derivatives of any order.
            mean = torch.stack([each.real.to(leaf.device, leaf.dtype) for each in means]).sum()
            return leaf.detach() + mean.sin() * 0

        return map_tensors(copied, self._answer)


class _InPlaceOf:
    """Called in the place of a model's ``forward``; a copy of the model has its own."""

    def __init__(self, own: Any, instead: Callable[..., Any]) -> None:
        self._own = own
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._own,)


def _itself(own: Any) -> Any:
    return own


def _without_graph(leaf: torch.Tensor) -> torch.Tensor:
    copied = leaf.detach().clone()
    return copied.requires_grad_(leaf.requires_grad) if copied.is_floating_point() or copied.is_complex() else copied


def _leaves_more(model: torch.nn.Module) -> bool:
    """Whether a model that was run holds something by which a gradient flows, or may have put it elsewhere, by a hook."""
    for module in model.modules():
        if not all(_is_own(hook) for hook in module._forward_hooks.values()):
            return True
        held = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves_of(held)):
            return True
    return False


def _is_own(hook: Any) -> bool:
    return type(getattr(hook, "__self__", hook)).__module__.startswith("elasticdl.elastic.")
