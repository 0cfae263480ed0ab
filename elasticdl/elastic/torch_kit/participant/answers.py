"""What workers tell each other while they make a step, beside gradients: one answer for all, also where a lost worker tears the step.

A script that is given an answer goes on by it, and can't be asked again. So an answer that any worker has had is that of all; it
travels with the training state, and in a new world who has had the most tells the others.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from elasticdl.elastic.collectives.port import Collective


class Answers:
    """Of the step in hand, in the order in which the scripts of all workers ask."""

    def __init__(self) -> None:
        self._step = 0  # its number; 0 between two steps
        self._known: list[Any] = []
        self.asked = 0  # by this worker's script
        self.has_own = (
            False  # the script was given an answer of this worker's own, as the world has broken between two steps
        )

    def begin_step(self, step: int) -> None:
        """This worker's script is given the first batch of this step; perhaps once more, or after others."""
        if step != self._step:
            self._step, self._known = step, []
        self.asked = 0

    def close_step(self) -> None:
        self._step, self._known, self.asked = 0, [], 0

    def ask(self) -> int:
        """The number of the question that this worker's script asks next."""
        self.asked += 1
        return self.asked - 1

    def known(self, number: int) -> bool:
        return number < len(self._known)

    def __getitem__(self, number: int) -> Any:
        return self._known[number]

    def add(self, answer: Any) -> None:
        self._known.append(answer)

    def agree(self, collective: Collective) -> bool:
        """Have all members of a new world know what one of them knows. Returns whether any of them `has_own`.

        Raises:
            WorldBroken: nothing has changed.
        """
        world = collective.world
        mine = pickle.dumps((self._step, self._known))
        table = torch.zeros(world.size, 4, dtype=torch.float64)
        row = [self._step, len(self._known), len(mine), float(self.has_own)]
        table[world.rank] = torch.tensor(row, dtype=torch.float64)
        collective.sum_([table], "elasticdl.answers")
        found = [(int(step), int(number)) for step, number, _, _ in table.tolist()]
        most = max(found)
        if any(each != most for each in found):
            teller = found.index(most)
            content = torch.zeros(int(table[teller, 2]), dtype=torch.uint8)
            if world.rank == teller:
                content.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            collective.sum_([content], "elasticdl.answers.known")
            self._step, self._known = pickle.loads(content.numpy().tobytes())
        return bool(table[:, 3].any())

    # -- as a part of the training state --

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "known": list(self._known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._known = state["step"], list(state["known"])
