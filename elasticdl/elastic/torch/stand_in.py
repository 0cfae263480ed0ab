"""What a worker does that has come later, on its script's way to where the job stands: as little as the script allows.

The others wait for it meanwhile. So the model is run on a stand-in for a batch once, and then gives the same answer again.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils import _pytree

from elasticdl.elastic.torch.tape import SIMPLE


class ModelFromMemory:
    """A model that is called with the same shapes again and again, and whose answers don't matter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._forward: Any = None  # the model's own, while this one takes its place
        self._was_own = False  # an attribute of the model itself, and not of its class
        self._described: Any = None  # what it was called with
        self._answer: Any = None
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
            self._model.forward = self._answer_again

    def end(self) -> None:
        """The model is its own again."""
        if self._forward is None:
            return
        if self._was_own:
            self._model.forward = self._forward
        else:
            del self._model.forward
        self._forward = self._described = self._answer = None
        self.batches = 0

    def _answer_again(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        described = (structure, shapes, self._model.training, torch.is_grad_enabled())
        if self._described is not None and described == self._described:
            return self._copy_of_answer()
        answer = self._forward(*args, **kwargs)
        tensors = all(isinstance(leaf, (torch.Tensor, *SIMPLE)) for leaf in _pytree.tree_leaves(answer))
        if tensors and all(isinstance(leaf, SIMPLE) for leaf in shapes):
            self._described, self._answer = described, answer
        return answer

    def _copy_of_answer(self) -> Any:
        """A little gradient flows all the same: a GradScaler misses it else."""
        trained = [each for each in self._model.parameters() if each.requires_grad]
        smallest = min(trained, key=torch.Tensor.numel, default=None)

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if smallest is None or not leaf.requires_grad:
                return leaf.detach().clone()
            return leaf.detach() + (smallest.sum() * 0).to(leaf.device, leaf.dtype)

        return _pytree.tree_map(copied, self._answer)
