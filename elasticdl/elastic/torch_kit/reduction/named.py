"""Tensors that a forward pass moves, known by their modules and names: it may put other tensors in their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

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
        self._saved = Saved()

    @property
    def _looks(self) -> bool:
        return self._looked < STEPS_LOOKED_AT

    def known(self) -> list[NamedTensor]:
        return [each for each in self._known if (now := each.tensor) is not None and not now.requires_grad]

    def save(self) -> None:
        """What `restore` goes back to. Copies of those that may be none take no memory of a device."""
        self._saved.save(self.possible(), on_host=self._looks)

    def restore(self) -> None:
        self._saved.restore()

    def begin(self) -> None:
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
