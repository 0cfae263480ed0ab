"""What a plain loop counts and remembers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from elasticdl.elastic.training.pieces import Piece, Value


class Values(SimpleNamespace):
    """See `elasticdl.elastic.torch.prepare.PlainLoop.values`."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class TakenBack:
    """The values as the script has left them in a step that is torn. Others may be sent them meanwhile as they were before."""

    def __init__(self) -> None:
        self._left: list[tuple[Value, Any]] = []

    def take_back(self, pieces: Sequence[Piece]) -> None:
        if not self._left:  # else the step is torn again
            mine = [each for each in pieces if isinstance(each, Value) and isinstance(each.value, Values)]
            self._left = [(each, copy.deepcopy(each.dump())) for each in mine]
            for each in mine:
                each.undo()

    def give_back(self) -> None:
        for piece, left in self._left:
            piece.load(left)
        self.forget()

    def forget(self) -> None:
        """What was taken back is not given back."""
        self._left = []
