"""A newcomer's way to where the job stands, by its script's own loops.

The script is given a stand-in for each batch that the job has trained on. Most of the way it goes before this worker asks for a world, so that
nobody waits for it.

With it what is answered from memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.torch.torn_step import SIMPLE
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OwnLoader, StandIn, map_tensors
from elasticdl.elastic.torch_kit.tensors import ElasticContext, is_sharded
from elasticdl.elastic.training.pieces import leaves_of

# What a worker does that has come later, on its script's way to where the job stands: as little as the script allows.
#
# The others wait for it meanwhile. So the model is run on a stand-in for a batch once, and then gives the same answer again.


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
        if self._forward is None:
            return type(self._model).forward(self._model, *args, **kwargs)
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
        every = (*self._model.parameters(), *given)
        flow = [with_history(each) for each in every if isinstance(each, torch.Tensor)]
        means = [each.mean() for each in flow if each.requires_grad and each.numel()]

        def copied(leaf: torch.Tensor) -> torch.Tensor:
            if not means or not leaf.requires_grad:
                return leaf.detach().clone()
            # A sine is finite, and has derivatives of any order.
            mean = torch.stack([each.real.to(leaf.device, leaf.dtype) for each in means]).sum()
            return leaf.detach() + mean.sin() * 0

        return map_tensors(copied, self._answer)


def with_history(tensor: Any) -> torch.Tensor:
    """What is here of it; a gradient of that is one of the whole."""
    here: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return here


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
    """Or of those that share a model among processes: what these hold is gone behind a pass."""
    origin = type(hook.__self__) if hasattr(hook, "__self__") else hook if hasattr(hook, "__module__") else type(hook)
    return str(origin.__module__).startswith(("elasticdl.elastic.", "torch.distributed."))


log = logging.getLogger(__name__)


class Approach:
    """Of one script."""

    def __init__(self, job: ElasticContext, model: torch.nn.Module, data: OwnLoader, start: int) -> None:
        """``start``: the epoch with which the script's first loop begins."""
        self.begins = start
        self.stands = (
            start,
            0,
        )  # epoch and position, behind the last batch that the script was given, or a stand-in for that
        # Epochs, and batches of the next, that are passed by before this worker asks for a world.
        self.jobs_place = 0, 0
        self._job = job
        self._data = data
        self._from_memory = ModelFromMemory(model)

    def begin(self) -> None:
        """The script begins its first loop."""
        self.jobs_place = self._job.session.jobs_place()

    def joins(self, at: Progress) -> None:
        """This worker is in a world; the job stands ``at`` this place.

        Raises:
            UserError: the script's loop has begun elsewhere.
        """
        # Where the others wait at their end the last epoch is not over, though the script has read its checkpoint.
        if self.begins > at.epoch + 1:
            raise UserError(
                f"elastic.prepare(start_epoch={self.begins}) is ahead of the job, which stands in epoch {at.epoch + 1}: after `elasticdl stop` "
                "the job goes on from what was kept: give --no_resume if the script's own checkpoint is to count"
            )

    def stand_ins(self, drawn: Sequence[GlobalBatch]) -> Generator[Any, None, int]:
        """One for each batch of this epoch that is passed by. Returns the number of the batch that comes next."""
        stand_in: StandIn | None = None
        number = 0
        while number < len(drawn) and (drawn[number].epoch, number) < self.jobs_place:
            batch = drawn[number]
            self.pass_by(batch)
            stand_in = stand_in or self._data.stand_in(batch, self._job.most_workers)
            yield stand_in.take()
            number += 1
        return number

    def pass_by(self, batch: GlobalBatch) -> None:
        """The script is given a stand-in next, in the place of this batch."""
        self.stands = (batch.epoch + 1, 0) if batch.is_last else (batch.epoch, batch.end)
        self._from_memory.begin_batch()

    def ends(self) -> None:
        """The worker stands where the job stands."""
        log.info("has caught up: %d batches of others in %.3f s", self._from_memory.batches, self._from_memory.seconds)
        self._from_memory.end()

    @property
    def has_passed_by(self) -> bool:
        """The script was given stand-ins, or a loop without a batch."""
        return self.stands != (self.begins, 0)

    def is_short_of(self, at: Progress) -> bool:
        """Whether the script stands before this place of the job's."""
        return (at.epoch, at.position) > self.stands
