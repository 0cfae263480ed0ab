"""What workers tell each other beside gradients: one answer for all, also where a lost worker tears the step.

A script that is given an answer goes on by it, and can't be asked again. So an answer that any worker has had is that of all; it
travels with the training state, and in a new world who has had the most tells the others.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.tensors import ElasticContext

log = logging.getLogger(__name__)

T = TypeVar("T")


class Answers:
    """Of the step in hand, in the order in which the scripts of all workers ask."""

    def __init__(self) -> None:
        self._step = 0  # its number; 0 between two steps
        self._known: list[Any] = []
        self.asked = 0  # by this worker's script
        # The script was given an answer of this worker's own, as the world has broken between two steps.
        self.has_own = False

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


class Asking(Protocol):
    """The worker that asks; see `elasticdl.elastic.torch_kit.participant.Participant`."""

    job: ElasticContext
    state: LoopState
    is_reduced: bool
    is_torn: bool
    is_catching_up: bool

    @property
    def open_batches(self) -> Sequence[Any]: ...

    def tear(self, failure: WorldBroken) -> None: ...

    def drop(self, error: Exception) -> None: ...


class Agreements:
    """Small collectives that the scripts of all workers call alike."""

    def __init__(self, asking: Asking, answers: Answers) -> None:
        self._asking = asking
        self._answers = answers
        self._unheard_in = -1  # the world that broke between two steps, while something was said

    def agree(self, tell: Callable[[], T], own: T, *, mends: bool = True, alone: str = "") -> T | None:
        """What ``tell``, a collective, gives all workers; ``own`` on a worker that is alone or catching up.

        Between two steps nobody mends a world that breaks; the next step does. The answer is None then; with ``alone``, which says
        for people what is asked, each worker goes on with its own, and the job is warned.

        ``mends``: a world that breaks within a step is mended here. If not, this raises WorldBroken, and the question is asked again
        when the step is made again.
        """
        asking = self._asking
        if (asking.job.size == 1 and not asking.is_torn) or asking.is_catching_up:
            return own
        if bool(asking.open_batches) and not asking.is_reduced:
            answer = self.ask(tell, mends=mends)
            return own if answer is None and not asking.open_batches else answer
        if self._unheard_in != asking.job.world.version:
            try:
                with asking.job.waiting():
                    return tell()
            except WorldBroken as failure:
                self._unheard_in = asking.job.world.version
                log.info("the world broke between two steps: %s", failure)
                if alone:
                    self._answers.has_own = True
                    asking.job.warn(f"{alone} is each worker's own: {failure}")
        return own if alone else None

    def any_of(self, wishes: Sequence[bool], what: str, own: Sequence[bool]) -> Sequence[bool] | None:
        """For each of these, whether any worker wishes it; otherwise as `agree`. ``what``: is asked, for people."""

        def tell() -> list[bool]:
            flags = torch.tensor([float(each) for each in wishes])
            self._asking.job.collective.sum_asked(flags, what)
            return [each > 0 for each in flags.tolist()]

        return self.agree(tell, own)

    def ask(self, tell: Callable[[], Any], *, mends: bool = True) -> Any | None:
        """As `agree`, with batches open that are not summed yet. None: the step was dropped, or others have made it."""
        asking, answers = self._asking, self._answers
        number = answers.ask()
        while not answers.known(number):
            try:
                asking.state.begin_launched()
                with asking.job.waiting():
                    answers.add(tell())
            except WorldBroken as failure:
                if not mends:
                    raise
                asking.tear(failure)
            except Exception as error:
                if not asking.is_torn:
                    raise
                asking.drop(error)
            if asking.is_catching_up or not asking.open_batches:
                return None
        return answers[number]
