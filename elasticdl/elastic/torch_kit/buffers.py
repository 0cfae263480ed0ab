"""What a forward pass does to a model's buffers must not depend on how many micro-batches a worker runs one after the other.

So each micro-batch begins with the buffers of before the step, and what it moves them by is summed like the gradients:
statistics (floating point, as of batch norm) by the mean over all micro-batches, weighed by samples; counters (integers) by
what the step's very first micro-batch moves them.

A buffer is known by its module and its name: a forward pass may assign another tensor to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.tensors import Kind, flat_views, in_memory_order

OBSERVER = "ObserverBase"  # of torch's quantization, by its name, as importing that takes long


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """At present it may be another tensor than before, or none."""

    module: torch.nn.Module
    key: str
    is_cache: bool  # no part of the module's state: one that changes its shape is each worker's own

    @property
    def tensor(self) -> torch.Tensor | None:
        places = self.module._buffers
        return places[self.key] if self.key in places else None  # noqa: SIM401  a ScriptModule's have no `get`

    def put(self, tensor: torch.Tensor) -> None:
        self.module._buffers[self.key] = tensor

    def name_in(self, roots: Iterable[torch.nn.Module]) -> str:
        for root in roots:
            for prefix, module in root.named_modules():
                if module is self.module:
                    return f"{prefix}.{self.key}" if prefix else self.key
        return self.key


def named_buffers(roots: Iterable[torch.nn.Module]) -> list[NamedBuffer]:
    """Of some modules, each tensor once."""
    found: dict[int, NamedBuffer] = {}
    for module in modules_of(roots):
        for key, tensor in module._buffers.items():
            if tensor is not None and not is_lazy(tensor):
                is_cache = key in module._non_persistent_buffers_set
                found.setdefault(id(tensor), NamedBuffer(module, key, is_cache))
    return list(found.values())


def modules_of(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Each once, in the order of `torch.nn.Module.modules`, which takes several times as long."""
    found: dict[int, torch.nn.Module] = {}
    pending = [*roots][::-1]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [each for each in module._modules.values() if each is not None][::-1]
    return list(found.values())


def is_alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether one can take the other's values, and neither has another shape or type."""
    if one is None or other is None:
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def least_samples(modules: Iterable[torch.nn.Module]) -> int:
    """That a part of a batch should have: batch norm can't do with one."""
    return 2 if any(isinstance(each, _BatchNorm) for each in modules_of(modules)) else 1


class _BufferGroup:
    """Buffers of one kind. They are copied to flat memory and back at once: a model has hundreds of small ones."""

    def __init__(self, named: list[NamedBuffer], buffers: list[torch.Tensor]) -> None:
        self.named = named
        self.begun: Sequence[torch.Tensor | None] = buffers
        self._is_counters = not (buffers[0].is_floating_point() or buffers[0].is_complex())
        self._before, self.views_before = flat_views(buffers)
        self._now, self._views = flat_views(buffers)
        self.delta = torch.zeros_like(self._before, dtype=torch.float32 if self._is_counters else None)
        self.begin([each.tensor for each in named])
        # Of which there is no mean: what observers of quantization keep; and what begins infinite, if the first pass moves it.
        begins_infinite = [not self._is_counters and bool(each.isinf().any()) for each in self.views_before]
        places = zip(named, self.views_before, self._views, begins_infinite, strict=True)
        self._ranges = [(one, was, now) for one, was, now, is_infinite in places if is_infinite or _is_observed(one)]

    @torch.no_grad()
    def begin(self, present: Sequence[torch.Tensor | None]) -> None:
        self.begun = present
        _copy(self.views_before, present)
        self.delta.zero_()

    @torch.no_grad()
    def add_moves(self, part: float, *, is_first: bool) -> None:
        """Raises:
        UserError: of one there is no mean.
        """
        part = float(is_first) if self._is_counters else part
        if not part:
            return
        self._take()
        for each, was, now in self._ranges:
            if not torch.equal(was, now):
                raise UserError(
                    f"the buffer {each.key} of {type(each.module).__name__} is a range, or begins infinite, and moves in the forward pass: the mean of what "
                    "workers have of their parts is not that of the batch. Fix it first: observers of quantization by a few batches before training, and "
                    "model.apply(torch.ao.quantization.disable_observer)"
                )
        # What stays as it is may be infinite, as in a mask.
        moves = torch.where(self._now == self._before, 0, _wide(self._now) - _wide(self._before))
        self.delta.add_(moves, alpha=part)

    @torch.no_grad()
    def reset(self) -> None:
        for each, begun in zip(self.named, self.begun, strict=True):
            if begun is not None and each.tensor is not begun:
                each.put(begun)
        # A backward pass that is yet to come has noted the buffers' versions.
        _copy([None if begun is None else begun.data for begun in self.begun], self.views_before)

    @torch.no_grad()
    def update(self) -> None:
        """The moves of all workers have been summed."""
        self._now.copy_(_wide(self._before) + self.delta.to(_wide(self._before).dtype))
        kept: list[torch.Tensor | None] = []
        for each, begun, view in zip(self.named, self.begun, self._views, strict=True):
            now = each.tensor
            kept.append(begun if now is begun else None)
            if now is not begun and is_alike(now, view):
                each.put(view.clone())  # what a forward pass has assigned may be a view of something else
        _copy(kept, self._views)

    def _take(self) -> None:
        """What stands there now.

        Raises:
            UserError: it is of another shape or type, so that there is no mean of it.
        """
        now: list[torch.Tensor | None] = []
        for each, begun, before in zip(self.named, self.begun, self.views_before, strict=True):
            tensor = each.tensor
            if (tensor is not begun or each.is_cache) and not is_alike(tensor, before):
                if not each.is_cache:
                    raise UserError(_of_another_shape(each, tensor, before))
                tensor = before
            now.append(tensor)
        _copy(self._views, now)


class Buffers:
    """The buffers of some modules in the course of a step."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._roots = list(modules)
        self._groups: list[_BufferGroup] = []
        self._caches: dict[
            NamedBuffer, torch.Tensor
        ] = {}  # as they were first: one that grows is each worker's own from then on
        self._is_counted = False  # a micro-batch of this step has been added to the sums
        self._is_alone = False  # that micro-batch is the whole step
        self.find()

    def find(self) -> None:
        """There may be others than before: they are found anew, and a step begins."""
        kinds: dict[Kind, list[tuple[NamedBuffer, torch.Tensor]]] = {}
        for each in named_buffers(self._roots):
            if (tensor := each.tensor) is not None and _can_be_moved(tensor):
                laid_out = self._caches.setdefault(each, tensor) if each.is_cache else tensor
                kinds.setdefault((laid_out.dtype, laid_out.device), []).append((each, laid_out))
        self._groups = [_BufferGroup([e for e, _ in kind], [t for _, t in kind]) for kind in kinds.values()]
        self._is_counted = self._is_alone = False

    @property
    def deltas(self) -> list[torch.Tensor]:
        """To be summed over the world between `close` and `update`; other tensors once there are other buffers."""
        return [group.delta for group in self._groups]

    def present(self) -> list[torch.Tensor]:
        """What `reset` puts back."""
        return [tensor for group in self._groups for each in group.named if (tensor := each.tensor) is not None]

    def begin(self) -> None:
        self._is_counted = self._is_alone = False
        present = [[each.tensor for each in group.named] for group in self._groups]
        if any(map(_is_other, self._groups, present)):
            self.find()
            return
        for group, tensors in zip(self._groups, present, strict=True):
            group.begin(tensors)

    def add(self, weight: float, *, is_first: bool, alone: bool) -> None:
        """Count what a micro-batch's forward pass has done; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step. ``alone``: there is no
        other worker.

        Raises:
            UserError: a buffer has changed its shape, or moves and has no mean.
        """
        self._is_counted = True
        self._is_alone = alone and weight == 1.0  # the buffers are what they should be
        for group in () if self._is_alone else self._groups:
            group.add_moves(weight, is_first=is_first)

    def reset(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        for group in self._groups:
            group.reset()

    def close(self, share: float | None, *, is_first: bool = False) -> None:
        """All of this worker's micro-batches have been added.

        ``share``: this worker's part in a step whose batches are its own, of which none is added; None in any other. ``is_first``: of all workers.
        """
        if share is not None and not self._is_counted:
            for group in self._groups:
                group.delta.zero_()  # of a step before, after which none was begun
                group.add_moves(share, is_first=is_first)

    def update(self) -> None:
        """The deltas have been summed."""
        for group in () if self._is_alone else self._groups:
            group.update()


# A forward pass may move parameters that are not trained, as those of a target network, which follow others by momentum. In a step that is made
# again, or in several micro-batches, they would move once more.

STEPS_LOOKED_AT = 4  # in the first one what follows may be equal to what it follows
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenParameters:
    """Refuses a model whose forward pass changes them, in its first steps."""

    def __init__(self, roots: Iterable[torch.nn.Module]) -> None:
        self._roots = list(roots)
        self._steps_left = STEPS_LOOKED_AT
        self._before: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []  # names, and checksums

    def begin(self) -> None:
        """Passes come next. Between them, as behind a batch of several, a script may change what it likes."""
        self._before = [(name, each, _sum_bits(each)) for name, each in self._frozen()] if self._steps_left else []

    def require_unchanged(self) -> None:
        """Raises:
        UserError: a pass has changed one.
        """
        for name, each, bits in self._before:
            if not torch.equal(_sum_bits(each), bits):
                raise UserError(
                    f"the forward pass changes {name}, which is not trained, as of a target network, and a step may take several passes: update the target "
                    "network after optimizer.step()"
                )

    def end_step(self) -> None:
        self._steps_left -= bool(self._before)
        self._before = []

    def _frozen(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for root in self._roots:
            for name, each in root.named_parameters():
                # Others may be quantized, in ways of their own.
                if type(each) is torch.nn.Parameter and not each.requires_grad and each.layout is torch.strided:
                    yield name, each


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Another one if any bit of it changes, but for very rare cases."""
    return in_memory_order(tensor.detach()).view(_INTEGERS.get(tensor.itemsize, torch.uint8)).sum()


def _is_other(group: _BufferGroup, present: Sequence[torch.Tensor | None]) -> bool:
    """Whether a buffer of this group has come to be of another kind since it was found."""
    return any(
        tensor is not begun and not each.is_cache and not is_alike(tensor, before)
        for each, tensor, begun, before in zip(group.named, present, group.begun, group.views_before, strict=True)
    )


def _of_another_shape(each: NamedBuffer, tensor: torch.Tensor | None, before: torch.Tensor) -> str:
    def described(one: torch.Tensor | None) -> str:
        return "nothing" if one is None else f"{str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}"

    return (
        f"the buffer {each.key} of {type(each.module).__name__} was {described(before)} before the forward pass and is "
        f"{described(tensor)} after it: expected the same, as what it moves by is averaged over the workers; a cache is "
        "registered with persistent=False"
    )


def _is_observed(each: NamedBuffer) -> bool:
    return any(kind.__name__ == OBSERVER for kind in type(each.module).__mro__)


def _copy(to: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> None:
    """Where there are two of one shape; a cache of another shape is each worker's own."""
    pairs = [(a, b) for a, b in zip(to, values, strict=True) if a is not None and b is not None and a.shape == b.shape]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Numbers that can be subtracted."""
    return values.to(torch.int8) if values.dtype == torch.bool else values


def _can_be_moved(buffer: torch.Tensor) -> bool:
    """Whether PyTorch adds and subtracts such numbers; the others, as quantized weights, must stay as they are, which the workers' check sees."""
    if buffer.is_floating_point():
        return buffer.itemsize > 1
    return buffer.dtype not in (torch.uint16, torch.uint32, torch.uint64, torch.complex32)
