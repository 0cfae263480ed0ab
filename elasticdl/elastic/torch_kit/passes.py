"""What the passes of a step may do beside its sums: which gradients they make, of which losses, and how they move a model's buffers.

What a forward pass does to buffers must not depend on how many micro-batches a worker runs one after the other. So each
micro-batch begins with the buffers of before the step, and what it moves them by is summed like the gradients:
statistics (floating point, as of batch norm) by the mean over all micro-batches, weighed by samples; counters (integers) by
what the step's very first micro-batch moves them. A buffer that is not persistent is each worker's own.

A buffer is known by its module and its name: a forward pass may assign another tensor to it.

Until they are summed over the workers, gradients are those of this worker's part of the batches in hand, each weighed in its backward
pass. Gradients that come otherwise are not, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.tensors import Kind, flat_views, in_memory_order, local


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """At present it may be another tensor than before, or none."""

    module: torch.nn.Module
    key: str
    is_cache: bool  # no part of the module's state

    @property
    def tensor(self) -> torch.Tensor | None:
        places = self.module._buffers
        return places[self.key] if self.key in places else None  # noqa: SIM401  a ScriptModule's have no `get`

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
        self._begun = buffers  # the tensors that are there when a step begins
        self._is_counters = not (buffers[0].is_floating_point() or buffers[0].is_complex())
        self._before, self._views_before = flat_views(buffers)
        self._now, self._views = flat_views(buffers)
        self.delta = torch.zeros_like(self._before, dtype=torch.float32 if self._is_counters else None)
        self.begin()
        # Of which there is no mean once they move: ranges that observers of quantization keep begin so.
        places = zip(named, self._views_before, self._views, strict=True)
        self._infinite = [each for each in places if not self._is_counters and bool(each[1].isinf().any())]

    @torch.no_grad()
    def begin(self) -> bool:
        """Returns whether the buffers are of the kinds that they were when they were found."""
        present = self._present()
        if present is None:
            return False
        self._begun = present
        torch._foreach_copy_(self._views_before, present)
        self.delta.zero_()
        return True

    @torch.no_grad()
    def add_moves(self, part: float, *, is_first: bool) -> None:
        """Raises:
        UserError: of one there is no mean.
        """
        part = float(is_first) if self._is_counters else part
        if not part:
            return
        present = self._present()
        if present is None:
            raise UserError(self._of_another_shape())
        torch._foreach_copy_(self._views, present)
        for each, was, now in self._infinite:
            if not torch.equal(was, now):
                raise UserError(
                    f"the buffer {each.key} of {type(each.module).__name__} begins infinite and moves in the forward pass: the mean of what workers have of "
                    "their parts is not that of the batch. Fix it first: observers of quantization by a few batches before training, and "
                    "model.apply(torch.ao.quantization.disable_observer)"
                )
        # What stays as it is may be infinite, as in a mask.
        moves = torch.where(self._now == self._before, 0, _wide(self._now) - _wide(self._before))
        self.delta.add_(moves, alpha=part)

    def reset(self) -> None:
        self._put(self._views_before)

    @torch.no_grad()
    def update(self) -> None:
        """The moves of all workers have been summed."""
        self._now.copy_(_wide(self._before) + self.delta.to(_wide(self._before).dtype))
        self._put(self._views)

    @torch.no_grad()
    def _put(self, views: list[torch.Tensor]) -> None:
        """Have these values in the tensors that were there when the step began; a forward pass may have assigned others."""
        for each, begun in zip(self.named, self._begun, strict=True):
            if each.tensor is not begun:
                each.module._buffers[each.key] = begun
        # A backward pass that is yet to come has noted the buffers' versions.
        torch._foreach_copy_([begun.data for begun in self._begun], views)

    def _present(self) -> list[torch.Tensor] | None:
        """What is there now; None if one is of another shape or type."""
        found: list[torch.Tensor] = []
        for each, begun, before in zip(self.named, self._begun, self._views_before, strict=True):
            tensor = each.tensor
            if tensor is None or (tensor is not begun and not is_alike(tensor, before)):
                return None
            found.append(tensor)
        return found

    def _of_another_shape(self) -> str:
        each, before = next(
            (each, was)
            for each, was in zip(self.named, self._views_before, strict=True)
            if not is_alike(each.tensor, was)
        )
        was, now = (
            "nothing" if one is None else f"{str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}"
            for one in (before, each.tensor)
        )
        return (
            f"the buffer {each.key} of {type(each.module).__name__} was {was} before the forward pass and is {now} after it: expected the same, as what it "
            "moves by is averaged over the workers; a cache is registered with persistent=False"
        )


class Buffers:
    """The buffers of some modules in the course of a step."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._roots = list(modules)
        self._groups: list[_BufferGroup] = []
        self._is_alone = False  # that micro-batch is the whole step
        self.find()

    def find(self) -> None:
        """There may be others than before: they are found anew, and a step begins."""
        kinds: dict[Kind, list[tuple[NamedBuffer, torch.Tensor]]] = {}
        for each in named_buffers(self._roots):
            if not each.is_cache and (tensor := each.tensor) is not None and _can_be_moved(tensor):
                kinds.setdefault((tensor.dtype, tensor.device), []).append((each, tensor))
        self._groups = [_BufferGroup([e for e, _ in kind], [t for _, t in kind]) for kind in kinds.values()]
        self._is_alone = False

    @property
    def deltas(self) -> list[torch.Tensor]:
        """To be summed over the world between the last `add` and `update`; other tensors once there are other buffers."""
        return [group.delta for group in self._groups]

    def present(self) -> list[torch.Tensor]:
        """What `reset` puts back."""
        return [tensor for group in self._groups for each in group.named if (tensor := each.tensor) is not None]

    def begin(self) -> None:
        self._is_alone = False
        if not all(group.begin() for group in self._groups):
            self.find()

    def add(self, weight: float, *, is_first: bool, alone: bool) -> None:
        """Count what a micro-batch's forward pass has done; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step. ``alone``: there is no
        other worker.

        Raises:
            UserError: a buffer has changed its shape, or moves and has no mean.
        """
        self._is_alone = alone and weight == 1.0  # the buffers are what they should be
        for group in () if self._is_alone else self._groups:
            group.add_moves(weight, is_first=is_first)

    def reset(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        for group in self._groups:
            group.reset()

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


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Numbers that can be subtracted."""
    return values.to(torch.int8) if values.dtype == torch.bool else values


def _can_be_moved(buffer: torch.Tensor) -> bool:
    """Whether PyTorch adds and subtracts such numbers; the others, as quantized weights, must stay as they are, which the workers' check sees."""
    if buffer.is_floating_point():
        return buffer.itemsize > 1
    return buffer.dtype not in (torch.uint16, torch.uint32, torch.uint64, torch.complex32)


# Whether a loss is a mean over the samples, as far as the functions tell that have made it.
#
# A worker's part of a batch is weighed by its samples, so a sum over samples is refused. What a loss is otherwise, such as a mean by class weights,
# nobody looks at.

SUM = 2  # as functions of torch's keep ``reduction``
# Through which the terms of a sum are looked for.
_PASSED = ("Add", "Sub", "Neg", "View", "Squeeze", "Unsqueeze", "Reshape", "ToCopy")
# What is multiplied may be divided by the number of samples; what is stacked are losses.
_MAY_BE_MEAN = ("Mul", "Div", "Stack", "Cat", "Softmax")


def require_mean(loss: Any, samples: int, *, is_scaled: bool = False) -> None:
    """``samples``: of which it was made. ``is_scaled``: it was multiplied last, by a GradScaler.

    Raises:
        UserError: it is a sum over them.
    """
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return
    for term in _terms(loss.grad_fn, is_scaled=is_scaled):
        if _is_sum(term, samples):
            raise UserError(
                f"the loss is a sum over the samples ({_name(term)} with reduction='sum', or .sum()), and each worker's part of a batch is "
                "weighed as a mean: divide it by the number of samples, or give reduction='mean'"
            )


def _terms(node: Any, *, is_scaled: bool) -> Iterator[Any]:
    """The functions whose results are added to a loss."""
    if is_scaled and node.name().startswith("Mul"):
        node = node.next_functions[0][0]
    pending = [node]
    while pending:
        each = pending.pop()
        if each is None:
            continue
        if each.name().startswith(_PASSED):
            pending += [following for following, _ in each.next_functions]
        else:
            yield each


def _is_sum(node: Any, samples: int) -> bool:
    if hasattr(node, "_saved_reduction"):
        return bool(node._saved_reduction == SUM)
    if not node.name().startswith("SumBackward0") or samples < 2:
        return False
    within = node.next_functions[0][0]
    # Of a parameter, as in a penalty, the sum is no sum over samples.
    of_parameter = any(each is not None and "AccumulateGrad" in each.name() for each, _ in within.next_functions[:1])
    shape = node._saved_self_sym_sizes
    return bool(shape) and shape[0] == samples and not of_parameter and not within.name().startswith(_MAY_BE_MEAN)


def _name(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


NONE = (0, 0)  # no gradient


@dataclass(frozen=True, slots=True)
class Remedy:
    """What a script is told whose gradients are not those of weighed passes."""

    made_by: str  # what makes weighed ones
    changed: str = "after the step's last pass"  # where gradients are summed, and may be changed


class WeighedGradients:
    """Whether gradients were made in passes that are weighed, and not beside these: told without a look at numbers."""

    def __init__(self, remedy: Remedy | None) -> None:
        """``remedy``: None if it makes no difference how they are made."""
        self._remedy = remedy
        self._parameters: list[torch.nn.Parameter] = []
        self._seen: list[tuple[int, int]] | None = None  # of them, after the last pass; None: no gradient
        self._is_expected = False  # a pass

    def begin(self, parameters: list[torch.nn.Parameter]) -> None:
        """A step begins, without gradients."""
        self._parameters, self._seen, self._is_expected = parameters, None, False

    def accept(self) -> None:
        """The gradients that are there are right."""
        self._is_expected = False
        if self._remedy is not None:
            self._seen = self._present()

    def expect(self) -> None:
        """The script makes the next pass by itself, of a loss that is weighed."""
        self.require()
        self._is_expected = True

    def look(self, loss: object, samples: int, *, is_scaled: bool = False) -> None:
        """A pass is to be made of this loss; see `require_mean`."""
        if self._remedy is not None:
            require_mean(loss, samples, is_scaled=is_scaled)

    def require(self) -> None:
        """Raises:
        UserError: gradients are there that were made otherwise, or a pass is not over yet.
        """
        if self._is_expected:
            self.accept()
        elif self._remedy is not None and (present := self._present()) != self._seen:
            self._require(present, self._seen or [NONE] * len(present), self._remedy)

    def _require(self, present: list[tuple[int, int]], seen: list[tuple[int, int]], remedy: Remedy) -> None:
        for parameter, now, before in zip(self._parameters, present, seen, strict=True):
            if now == before or parameter.grad is None or not bool(local(parameter.grad).any()):
                continue
            raise UserError(
                f"gradients were made otherwise than by {remedy.made_by} (torch.autograd.backward, `parameter.grad = ...`), or used, as by optimizer.step() "
                "in a hook, or changed, as by clipping, before those of all workers are summed: "
                f"call {remedy.made_by}, and change them {remedy.changed}"
            )

    def _present(self) -> list[tuple[int, int]]:
        return [
            NONE if (gradient := each.grad) is None else (id(gradient), gradient._version) for each in self._parameters
        ]
