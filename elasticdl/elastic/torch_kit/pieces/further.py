"""Modules that a script trains, and has not given along: they are known by the optimizer's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from elasticdl.elastic.torch_kit.pieces.owners import owners

IS_OUTSIDE = (
    "that the optimizer trains is no part of the state, so its buffers are each worker's own: give it along, as in "
    "TorchState(decoder=decoder)"
)


def further_modules(
    model: torch.nn.Module, groups: Iterable[dict[str, Any]], known: Iterable[Any]
) -> list[torch.nn.Module]:
    """Further ones that a script trains, beside what is ``known``: those that have buffers, which forward passes may move.

    ``groups``: parameter groups of the optimizers.
    """
    trained = [each for group in groups for each in group["params"]]
    ours = [model, *(each for each in known if isinstance(each, torch.nn.Module))]
    within = {id(each) for one in ours for each in one.modules()}
    theirs = {id(each) for one in ours for each in one.parameters()}
    numbers = {id(each): number for number, each in enumerate(trained) if id(each) not in theirs}
    if not numbers:
        return []
    candidates: list[tuple[int, int, str, torch.nn.Module]] = []
    for each in _holders_of([each for each in trained if id(each) in numbers]):
        if id(each) in within:
            continue
        first = min((numbers[id(one)] for one in each.parameters() if id(one) in numbers), default=None)
        if first is None or not any(True for _ in each.buffers()):
            continue
        inner = [id(one) for one in each.modules()]
        if not within.intersection(inner):  # else it wraps the model, and its other parts are found by themselves
            candidates.append((first, -len(inner), type(each).__qualname__, each))
    found: list[torch.nn.Module] = []
    for *_, each in sorted(candidates, key=lambda candidate: candidate[:3]):  # the same order on all workers
        inner = [id(one) for one in each.modules()]
        if not within.intersection(inner):
            found.append(each)
            within.update(inner)
    return found


def _holders_of(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Module]:
    """The modules that have them, and those that these are in."""
    found: dict[int, torch.nn.Module] = {}
    last: list[Any] = list(parameters)
    while last:
        last = [each for each in owners(last, torch.nn.Module) if id(each) not in found]
        found.update((id(each), each) for each in last)
    return list(found.values())
