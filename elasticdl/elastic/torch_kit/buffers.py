"""What a forward pass does to a model's buffers must not depend on how many micro-batches a worker runs one after the other.

So each micro-batch begins with the buffers of before the step, and what it moves them by is summed like the gradients:
statistics (floating point, as of batch norm) by the mean over all micro-batches, weighed by samples; counters (integers) by
what the step's very first micro-batch moves them, unless they count samples: these by the sum over all.

A buffer is known by its module and its name: a forward pass may assign another tensor to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.tensors import Kind, flat_views

# Tensors that a forward pass moves, known by their modules and names: it may put other tensors in their places.

# Followers are looked for in so many steps.
STEPS_LOOKED_AT = 4


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A buffer or a parameter; at present it may be another tensor than before, or none."""

    module: torch.nn.Module
    key: str
    is_parameter: bool = False
    is_cache: bool = False  # no part of the module's state: each worker may have its own

    @property
    def tensor(self) -> torch.Tensor | None:
        places = self.module._parameters if self.is_parameter else self.module._buffers
        return places[self.key] if self.key in places else None  # noqa: SIM401  a ScriptModule's have no `get`

    def put(self, tensor: torch.Tensor) -> None:
        places: Any = self.module._parameters if self.is_parameter else self.module._buffers
        places[self.key] = tensor

    def name_in(self, roots: Iterable[torch.nn.Module]) -> str:
        for root in roots:
            for prefix, module in root.named_modules():
                if module is self.module:
                    return f"{prefix}.{self.key}" if prefix else self.key
        return self.key


class NamedBuffers:
    """Those of some modules, each tensor once. A list stays the same one as long as there are no others."""

    def __init__(self, roots: Iterable[torch.nn.Module]) -> None:
        self.roots = list(roots)
        self._modules: list[torch.nn.Module] = []
        self._number = -1
        self._found: list[NamedTensor] = []

    def find(self, *, anew: bool = True) -> list[NamedTensor]:
        """``anew``: there may be other modules."""
        modules = modules_of(self.roots) if anew else self._modules
        number = sum(tensor is not None for module in modules for tensor in module._buffers.values())
        if number != self._number or list(map(id, modules)) != list(map(id, self._modules)):
            self._modules, self._number = modules, number
            self._found = self._look()
        return self._found

    def _look(self) -> list[NamedTensor]:
        found: dict[int, NamedTensor] = {}
        for module in self._modules:
            for key, tensor in module._buffers.items():
                if tensor is not None and not is_lazy(tensor):
                    is_cache = key in module._non_persistent_buffers_set
                    found.setdefault(id(tensor), NamedTensor(module, key, is_cache=is_cache))
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


class Saved:
    """Copies of tensors, and the way back to them."""

    def __init__(self) -> None:
        self._of: list[NamedTensor] = []
        self._copies: list[tuple[NamedTensor, torch.Tensor, torch.Tensor]] = []  # what stood there, and a copy of it

    @torch.no_grad()
    def save(self, every: list[NamedTensor], *, on_host: bool = False) -> None:
        """In the memory of the last copies, where these fit."""
        if every is not self._of or any(named.tensor is not tensor for named, tensor, _ in self._copies):
            before = {(id(named.module), named.key): copy for named, _, copy in self._copies}
            present = [(named, tensor) for named in every if (tensor := named.tensor) is not None]
            self._copies = [
                (named, tensor, _room(tensor, before.get((id(named.module), named.key)), on_host=on_host))
                for named, tensor in present
            ]
            self._of = every
        if self._copies:
            torch._foreach_copy_([copy for _, _, copy in self._copies], [tensor for _, tensor, _ in self._copies])

    @torch.no_grad()
    def restore(self) -> None:
        for named, tensor, copy in self._copies:
            now = named.tensor
            if named.is_cache and not is_alike(now, tensor):
                continue
            if now is not tensor:
                named.put(tensor)
            # A backward pass that is yet to come has noted the versions.
            tensor.data.copy_(copy)

    def moved(self) -> list[NamedTensor]:
        """Those that are not what they were."""
        return [
            named
            for named, _, copy in self._copies
            if (now := named.tensor) is not None and not (now.shape == copy.shape and torch.equal(now.to(copy), copy))
        ]


def _room(tensor: torch.Tensor, before: torch.Tensor | None, *, on_host: bool) -> torch.Tensor:
    device = torch.device("cpu") if on_host else tensor.device
    if before is not None and (before.shape, before.dtype, before.device) == (tensor.shape, tensor.dtype, device):
        return before
    return torch.empty_like(tensor, device=device)


class Followers:
    """Parameters that a forward pass moves, as those of a target network, which follow others by momentum.

    A worker moves them by itself, as all others do: once for each step, however many passes it makes. They are looked for among the
    parameters that are not trained, if these are no more than the trained ones: those of a frozen model would have to be copied.
    """

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._root = root
        self._known: list[NamedTensor] = []
        self._looked = 0  # steps
        self._before = Saved()  # the step in hand

    @property
    def _looks(self) -> bool:
        return self._looked < STEPS_LOOKED_AT

    def known(self) -> list[NamedTensor]:
        return [each for each in self._known if (now := each.tensor) is not None and not now.requires_grad]

    def begin(self) -> None:
        """What `reset` goes back to. Copies of those that may be none take no memory of a device."""
        self._before.save(self.possible(), on_host=self._looks)

    def reset(self) -> None:
        self._before.restore()

    def end(self) -> None:
        """A step with a pass is over."""
        if self._looks:
            self._looked += 1
            known = {(id(each.module), each.key) for each in self._known}
            self._known += [each for each in self._before.moved() if (id(each.module), each.key) not in known]

    def possible(self) -> list[NamedTensor]:
        """Those that are known, and those that may turn out to be some."""
        if not self._looks:
            return self.known()
        frozen: dict[int, NamedTensor] = {}
        sizes = {False: 0, True: 0}
        for module in modules_of([self._root] if self._root is not None else []):
            for key, parameter in module._parameters.items():
                if parameter is None or is_lazy(parameter) or id(parameter) in frozen:
                    continue
                sizes[parameter.requires_grad] += parameter.nbytes
                if not parameter.requires_grad:
                    frozen[id(parameter)] = NamedTensor(module, key, is_parameter=True)
        return list(frozen.values()) if sizes[False] <= sizes[True] else self.known()


OBSERVER = "ObserverBase"  # of torch's quantization, by its name, as importing that takes long
# Counts batches, whatever numbers a step has by chance.
BATCH_COUNTER = "num_batches_tracked"


def least_samples(modules: Iterable[torch.nn.Module]) -> int:
    """That a part of a batch should have: batch norm can't do with one."""
    return 2 if any(isinstance(each, _BatchNorm) for each in modules_of(modules)) else 1


class _BufferGroup:
    """Buffers of one kind. They are copied to flat memory and back at once: a model has hundreds of small ones.

    Some of them may count samples. One does if in each micro-batch of a step it moves, all its elements together, by the number of samples.
    """

    def __init__(self, named: list[NamedTensor], buffers: list[torch.Tensor]) -> None:
        self.named = named
        self.is_counters = not (buffers[0].is_floating_point() or buffers[0].is_complex())
        self.before, self._before = flat_views(buffers)
        self._now, self._views = flat_views(buffers)
        self.delta = torch.zeros_like(self.before, dtype=torch.float32 if self.is_counters else None)
        places = [*zip(named, self._before, self._views, strict=True)]
        # Of which there is no mean: what observers of quantization keep; and what begins infinite, if the first pass moves it.
        self._ranges = [one for one in places if any(kind.__name__ == OBSERVER for kind in type(one[0].module).__mro__)]
        offsets = [view.storage_offset() for view in self._before]
        deltas = [self.delta[start : start + each.numel()] for start, each in zip(offsets, self._before, strict=True)]
        every = zip(named, self._before, self._views, deltas, strict=True)
        # Of those that may count samples what each was, what it is, and by how much it moves.
        self._counters = [(before, now, delta) for one, before, now, delta in every if _may_count_samples(one, before)]
        sizes = [before.numel() for before, *_ in self._counters]
        # Sums over the micro-batches: of the moves of these; of the samples of those in which each fits; and of all that tell anything.
        self.counted = torch.zeros(sum(sizes) + len(sizes) + 1 if sizes else 0, device=self.before.device)
        self._moves = torch.split(self.counted[: sum(sizes)], sizes) if sizes else ()
        self._fitting = self.counted[sum(sizes) : -1]
        self._begun: Sequence[torch.Tensor | None] = buffers
        self.begin()
        has_infinite = not self.is_counters and bool(self.before.isinf().any())
        self._infinite = [each for each in places if bool(each[1].isinf().any())] if has_infinite else []

    @torch.no_grad()
    def begin(self) -> None:
        self._begun = [each.tensor for each in self.named]
        _copy(self._before, self._begun)
        self.delta.zero_()
        self.counted.zero_()

    @torch.no_grad()
    def add_moves(self, weight: float, samples: int, passes: int, *, is_first: bool) -> None:
        part = float(is_first) if self.is_counters else weight
        if part or (samples and self._counters):
            self._take()
            self._require_mean()
        if part:
            # What stays as it is may be infinite, as in a mask.
            moves = torch.where(self._now == self.before, 0, _wide(self._now) - _wide(self.before))
            self.delta.add_(moves, alpha=part)
        if not samples or not self._counters:
            return
        fits = []
        for (before, now, _), moves in zip(self._counters, self._moves, strict=True):
            move = (_wide(now) - _wide(before)).float().flatten()
            moves += move
            fits.append((move.sum() - samples).abs() < 0.01)
        self._fitting += torch.stack(fits) * samples
        if samples != passes:  # else one that counts batches moves alike
            self.counted[-1] += samples

    def _require_mean(self) -> None:
        for each, was, now in self._ranges + self._infinite:
            if not torch.equal(was, now):
                raise UserError(
                    f"the buffer {each.key} of {type(each.module).__name__} is a range, or begins infinite, and moves in the forward pass: the mean of what "
                    "workers have of their parts is not that of the batch. Fix it first: observers of quantization by a few batches before training, and "
                    "model.apply(torch.ao.quantization.disable_observer)"
                )
        self._infinite = []

    @torch.no_grad()
    def reset(self) -> None:
        for each, begun in zip(self.named, self._begun, strict=True):
            if begun is not None and each.tensor is not begun:
                each.put(begun)
        # A backward pass that is yet to come has noted the buffers' versions.
        _copy([None if begun is None else begun.data for begun in self._begun], self._before)

    @torch.no_grad()
    def take_share(self, share: float) -> None:
        """For a loop whose batches are its own."""
        if not self.is_counters:
            self._take()
            torch.mul(self._now, share, out=self.delta)

    @torch.no_grad()
    def update(self, samples: int, *, are_moves: bool) -> None:
        """``are_moves``: what was summed, in a step on so many samples; if not, the buffers themselves were."""
        if are_moves:
            for fitting, moves, (*_, delta) in zip(self._fitting, self._moves, self._counters, strict=True):
                counts_samples = (fitting == samples) & (self.counted[-1] > 0)
                delta.copy_(torch.where(counts_samples, moves.to(delta.dtype), delta))
            self._now.copy_(_wide(self.before) + self.delta.to(_wide(self.before).dtype))
        elif not self.is_counters:
            self._now.copy_(self.delta)
        else:
            return
        kept: list[torch.Tensor | None] = []
        for each, begun, view in zip(self.named, self._begun, self._views, strict=True):
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
        for each, begun, before in zip(self.named, self._begun, self._before, strict=True):
            tensor = each.tensor
            if (tensor is not begun or each.is_cache) and not is_alike(tensor, before):
                if not each.is_cache:
                    raise UserError(_of_another_shape(each, tensor, before))
                tensor = before
            now.append(tensor)
        _copy(self._views, now)


def _may_count_samples(named: NamedTensor, buffer: torch.Tensor) -> bool:
    if named.key == BATCH_COUNTER or buffer.is_complex():
        return False
    return buffer.numel() == 1 if buffer.is_floating_point() else buffer.dim() <= 1


class Buffers:
    """The buffers of some modules in the course of a step, and what follows the parameters of the first, the model."""

    def __init__(self, modules: Iterable[torch.nn.Module], *, may_be_summed: bool = True) -> None:
        """``may_be_summed``: there may be other workers."""
        self.found = NamedBuffers(modules)
        self._may_be_summed = may_be_summed
        self._still: list[tuple[NamedTensor, torch.Tensor, int]] = []  # which can't be summed, and their versions
        # As they are now: one that grows is each worker's own from then on.
        self._caches = [(each, each.tensor) for each in self.found.find() if each.is_cache]
        self._of: list[NamedTensor] = []  # from which it was laid out
        self._groups: list[_BufferGroup] = []
        self._laid_out: list[tuple[NamedTensor, torch.Tensor]] = []
        self.followers = Followers(self.found.roots[0] if self.found.roots else None)
        self._counted = False  # whether a micro-batch of this step has been added to the sums
        self._alone = False  # that micro-batch is the whole step
        self._are_moves = True  # what is summed
        self._lay_out(self._present())

    @property
    def deltas(self) -> list[torch.Tensor]:
        """To be summed over the world between `close` and `update`; other tensors once there are other buffers."""
        return [each for group in self._groups for each in (group.delta, group.counted) if len(each)]

    def begin(self) -> None:
        self._counted = self._alone = False
        self._are_moves = True
        self.followers.begin()
        present = self._present()
        if _is_other(present, self._laid_out):
            self._lay_out(present)
            return
        self._laid_out = present
        for group in self._groups:
            group.begin()

    def begin_passes(self) -> None:
        """The script may have changed the model since the step began; its first pass comes next."""
        if _is_other(self._present(), self._laid_out):
            self.begin()

    @torch.no_grad()
    def add(self, weight: float, *, is_first: bool, alone: bool, samples: int = 0, passes: int = 1) -> None:
        """Count what a micro-batch's forward pass has done; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step. ``alone``: there is no
        other worker. ``samples``: it has so many, in so many passes.

        Raises:
            UserError: a buffer has come, gone or changed its shape, or one has moved of a kind that can't be summed.
        """
        self._counted = True
        if moved := [each for each, tensor, version in self._still if _is_moved(each, tensor, version)]:
            raise UserError(
                f"the buffer {moved[0].name_in(self.found.roots)} moves in the forward pass and is {_kind_of(moved[0].tensor)}, of which "
                "workers can make no mean: keep it in float32, or in int64, and convert it where it is used"
            )
        self._alone = alone and weight == 1.0  # the buffers are what they should be
        if self._alone:
            return
        if new := self._new():
            raise UserError(
                f"the buffer {new[0].name_in(self.found.roots)} has come while a batch is in hand, with a value of this "
                "worker's part: register it when the model is made, with its shape"
            )
        for group in self._groups:
            group.add_moves(weight, samples, passes, is_first=is_first)

    def reset(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        for group in self._groups:
            group.reset()
        self.followers.reset()

    def close(self, share: float | None) -> None:
        """All of this worker's micro-batches have been added.

        ``share``: this worker's part in a step whose batches are its own, by which the statistics count; None in any other.

        Raises:
            UserError: this worker has no sample, and parameters that a forward pass moves.
        """
        self._are_moves = self._counted or share is None
        for group in () if self._are_moves else self._groups:
            group.take_share(share or 0.0)
        if self._are_moves and not self._counted and (followers := self.followers.known()):
            raise UserError(
                f"this worker has no sample in this step, and {followers[0].name_in(self.found.roots)} moves in the forward pass: make no batch "
                "smaller than the number of workers, with batch norm twice as many, as by drop_last=True"
            )

    def update(self, samples: int) -> None:
        """The deltas have been summed, over a step on so many samples."""
        for group in () if self._alone else self._groups:
            group.update(samples, are_moves=self._are_moves)
        if self._counted:
            self.followers.end()

    def _new(self) -> list[NamedTensor]:
        found = self.found.find(anew=False)
        if found is self._of:
            return []
        known = {(id(each.module), each.key) for each, _ in self._laid_out}
        present = [each for each in found if (now := each.tensor) is not None and _can_be_moved(now)]
        return [each for each in present if not each.is_cache and (id(each.module), each.key) not in known]

    def _present(self) -> list[tuple[NamedTensor, torch.Tensor]]:
        """Those that are summed, and what stands there. The others, which have to stay as they are, are noted."""
        self._of = self.found.find()
        every = [(each, tensor) for each in self._of if not each.is_cache and (tensor := each.tensor) is not None]
        every += [(each, tensor) for each, tensor in self._caches if tensor is not None]
        present = [(each, tensor) for each, tensor in every if _can_be_moved(tensor)]
        still = every if len(every) != len(present) and self._may_be_summed else []
        self._still = [
            (each, now, _version(now)) for each, now in still if not each.is_cache and not _can_be_moved(now)
        ]
        return present

    def _lay_out(self, present: list[tuple[NamedTensor, torch.Tensor]]) -> None:
        self._laid_out = present
        kinds: dict[Kind, list[tuple[NamedTensor, torch.Tensor]]] = {}
        for each, tensor in present:
            kinds.setdefault((tensor.dtype, tensor.device), []).append((each, tensor))
        self._groups = [_BufferGroup([e for e, _ in kind], [t for _, t in kind]) for kind in kinds.values()]


def _is_other(now: list[tuple[NamedTensor, torch.Tensor]], before: list[tuple[NamedTensor, torch.Tensor]]) -> bool:
    return len(now) != len(before) or any(
        tensor is not other and not (each == known and is_alike(tensor, other))
        for (each, tensor), (known, other) in zip(now, before, strict=True)
    )


def _of_another_shape(each: NamedTensor, tensor: torch.Tensor | None, before: torch.Tensor) -> str:
    def described(one: torch.Tensor | None) -> str:
        return "nothing" if one is None else f"{_kind_of(one)} of shape {tuple(one.shape)}"

    return (
        f"the buffer {each.key} of {type(each.module).__name__} was {described(before)} before the forward pass and is "
        f"{described(tensor)} after it: expected the same, as what it moves by is averaged over the workers; a cache is "
        "registered with persistent=False"
    )


def _kind_of(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _is_moved(each: NamedTensor, tensor: torch.Tensor, version: int) -> bool:
    return each.tensor is not tensor or _version(tensor) != version


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy(to: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> None:
    """Where there are two of one shape; a cache of another shape is each worker's own."""
    pairs = [(a, b) for a, b in zip(to, values, strict=True) if a is not None and b is not None and a.shape == b.shape]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Numbers that can be subtracted."""
    return values.to(torch.int8) if values.dtype == torch.bool else values


def _can_be_moved(buffer: torch.Tensor) -> bool:
    """Whether PyTorch adds and subtracts such numbers; the others, as quantized weights, must stay as they are."""
    if buffer.is_floating_point():
        return buffer.itemsize > 1
    return buffer.dtype not in (torch.uint16, torch.uint32, torch.uint64, torch.complex32)
