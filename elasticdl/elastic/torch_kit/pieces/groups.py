"""Which parameters the groups of an optimizer have: a worker that comes later makes those that were added since training began."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.optimizers import each_of
from elasticdl.elastic.torch_kit.pieces.torch_pieces import Modules
from elasticdl.elastic.training.pieces import Piece

Names = list[list[str]]  # of each group, those of its parameters; empty for one that no module has


class Groups(Piece):
    """Those of each optimizer. They are made before what else the optimizers hold is loaded."""

    name = "groups"
    in_checkpoints = False

    def __init__(self, modules: Modules, optimizer: Any, *, may_be_undone: bool) -> None:
        """``may_be_undone``: a step that is torn is begun again as a whole, and adds its groups again."""
        self._modules = modules
        self._optimizers = each_of(optimizer)
        self._may_be_undone = may_be_undone

    def keep(self) -> None:
        self._kept = [len(each.param_groups) for each in self._optimizers]

    def undo(self) -> None:
        for each, number in zip(self._optimizers, self._kept, strict=True) if self._may_be_undone else ():
            del each.param_groups[number:]

    def dump(self) -> list[Names]:
        names = {id(parameter): name for name, parameter in self._named()}
        return [
            [[names.get(id(parameter), "") for parameter in group["params"]] for group in each.param_groups]
            for each in self._optimizers
        ]

    def load(self, dumped: list[Names]) -> None:
        """Have the groups that another worker has, as far as they come after those that are here.

        Raises:
            UserError: they are others.
        """
        held = self.dump()
        if held == dumped:
            return
        by_name = dict(self._named())
        for mine, theirs, each in zip(held, dumped, self._optimizers, strict=True):
            added = theirs[len(mine) :]
            is_known = all(name in by_name for group in added for name in group)
            if theirs[: len(mine)] != mine or not is_known:
                pairs = zip(itertools.chain(*mine), itertools.chain(*theirs), strict=False)
                unlike = next((pair for pair in pairs if pair[0] != pair[1]), None)
                here, there = unlike or (f"groups of {_sizes(mine)} parameters", f"of {_sizes(theirs)}")
                raise UserError(
                    f"the optimizer {type(each).__name__} has {here} here, and {there} where the state comes from: a worker that comes later "
                    "can add groups of the model's parameters at the end; make all others when the optimizer is made"
                )
            for group in added:
                each.add_param_group({"params": [by_name[name] for name in group]})

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, root in enumerate(self._modules()):
            for name, parameter in root.named_parameters():
                yield f"{number}:{name}", parameter


@contextlib.contextmanager
def groups_are_there(optimizer: Any) -> Iterator[None]:
    """Within, who adds a group is on the way to where the job stands, and what was added there has been added here."""
    every = each_of(optimizer)
    for each in every:
        vars(each)["add_param_group"] = unless_known(each, each.add_param_group, lambda: True)
    try:
        yield
    finally:
        for each in every:
            del vars(each)["add_param_group"]


def unless_known(
    optimizer: torch.optim.Optimizer, add: Callable[[dict[str, Any]], None], is_catching_up: Callable[[], bool]
) -> Callable[[dict[str, Any]], None]:
    """``add``, which does nothing for parameters that the optimizer has, where ``is_catching_up`` holds."""

    def add_param_group(param_group: dict[str, Any]) -> None:
        if is_catching_up():
            given = param_group["params"]
            known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            parameters = [given] if isinstance(given, torch.Tensor) else list(given)
            param_group = {**param_group, "params": [each for each in parameters if id(each) not in known]}
            if not param_group["params"]:
                return
        add(param_group)

    return add_param_group


def _sizes(groups: Names) -> str:
    return " + ".join(str(len(group)) for group in groups) or "no"
