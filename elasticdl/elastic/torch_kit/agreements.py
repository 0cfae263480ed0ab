"""What workers tell each other beside gradients: one answer for all, also where a lost worker tears the step.

A script that is given an answer goes on by it, and can't be asked again. So an answer that any worker has had is that of all; it
travels with the training state, and in a new world who has had the most tells the others.

And where the job stands in the script, of which the answers are a part.
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.torch_kit.own_loader import Draws
from elasticdl.elastic.torch_kit.tensors import ElasticContext, RandomStreams
from elasticdl.elastic.training.pieces import Piece

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

    @property
    def present(self) -> tuple[int, int]:
        """The number of the step, and how many answers are known."""
        return self._step, len(self._known)

    # -- as a part of the training state --

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "known": list(self._known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._known = state["step"], list(state["known"])


class Asking(Protocol):
    """The worker that asks; see `elasticdl.elastic.torch_kit.participant.Participant`."""

    job: ElasticContext
    state: Any
    is_reduced: bool
    is_torn: bool

    @property
    def is_catching_up(self) -> bool: ...

    @property
    def open_batches(self) -> Sequence[Any]: ...

    def tear(self, failure: WorldBroken) -> None: ...

    def drop(self, error: Exception) -> None: ...


class Agreements:
    """Small collectives that the scripts of all workers call alike."""

    def __init__(self, asking: Asking, answers: Answers) -> None:
        self.asking = asking
        self._answers = answers
        self.unheard_in = -1  # the world that broke between two steps, while something was said

    def agree(self, tell: Callable[[], T], own: T, *, mends: bool = True, alone: str = "") -> T | None:
        """What ``tell``, a collective, gives all workers; ``own`` on a worker that is alone or catching up.

        Between two steps nobody mends a world that breaks; the next step does. The answer is None then; with ``alone``, which says
        for people what is asked, each worker goes on with its own, and the job is warned.

        ``mends``: a world that breaks within a step is mended here. If not, this raises WorldBroken, and the question is asked again
        when the step is made again.
        """
        asking = self.asking
        if (asking.job.is_alone and not asking.is_torn) or asking.is_catching_up:
            return own
        if bool(asking.open_batches) and not asking.is_reduced:
            answer = self.ask(tell, mends=mends)
            return own if answer is None and not asking.open_batches else answer
        if self.unheard_in != asking.job.world.version:
            try:
                with asking.job.waiting():
                    return tell()
            except WorldBroken as failure:
                self.unheard_in = asking.job.world.version
                log.info("the world broke between two steps: %s", failure)
                if alone:
                    self._answers.has_own = True
                    asking.job.warn(f"{alone} is each worker's own: {failure}")
        return own if alone else None

    def of_first(self, value: T, what: str = "", *, mends: bool = True) -> T | None:
        """Rank 0's value. ``what``: is asked, for people; empty if a worker's own does as well where the world breaks, which is None then."""

        def tell() -> T:
            told: T = pickle.loads(
                self.asking.job.collective.broadcast_bytes(pickle.dumps(value), "elasticdl.decision")
            )
            return told

        return self.agree(tell, value, mends=mends, alone=what)

    def mean(self, tensor: torch.Tensor, what: str, *, mends: bool = True) -> torch.Tensor:
        """Over the workers."""

        def tell() -> torch.Tensor:
            total = tensor.detach().cpu().double() / self.asking.job.size
            self.asking.job.collective.sum_asked(total, f"{what} (sync_dist=True)")
            return total.to(tensor.dtype)

        found = self.agree(tell, tensor, mends=mends, alone=what)
        return tensor if found is None else found.to(tensor.device)  # of another worker it may be known

    def ask(self, tell: Callable[[], Any], *, mends: bool = True) -> Any | None:
        """As `agree`, with batches open that are not summed yet. None: the step was dropped, or others have made it."""
        asking, answers = self.asking, self._answers
        number = answers.ask()
        while not answers.known(number):
            try:
                asking.state.reducer.begin_launched()
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


# Where the job stands in the script, beside its progress in the data.


@dataclass(frozen=True, slots=True)
class EpochBegin:
    """What the order of an epoch is drawn from: the global random streams, and what `Draws` captures."""

    epoch: int
    streams: bytes
    draws: bytes


class ScriptPosition(Piece):
    """Where the job stands in its script, beside `Progress`; travels with the training state."""

    name = "place"
    is_value = True
    shows_the_way = True

    def __init__(self) -> None:
        self.streams: dict[int, bytes] = {}  # of an epoch, the random streams with which it begins
        self.draws: dict[int, bytes] = {}  # of an epoch, what else its order is drawn from
        self.answers = Answers()
        self.repeats: dict[int, int] = {}  # of an epoch, how many batches were given once more
        self._seed = (-1, 0)  # of the epoch that was asked for last

    def seed_of(self, epoch: int) -> int:
        """Of what is drawn in this epoch's batches.

        Raises:
            UserError: the job does not stand there.
        """
        if epoch != self._seed[0]:
            if epoch not in self.streams:
                raise UserError(
                    f"the script goes on in epoch {epoch + 1}, where the job does not stand: it has swallowed an error before, as by `except Exception`"
                )
            self._seed = epoch, zlib.crc32(self.streams[epoch])
        return self._seed[1]

    def note_streams(self, epoch: int, draws: Draws, *, since: int) -> None:
        """This epoch begins with the present streams. Those before ``since`` are not needed any more."""
        self.streams = {**_from(since, self.streams), epoch: RandomStreams.capture()}
        self._seed = (-1, 0)
        self.draws = {**_from(since, self.draws), epoch: draws.capture()}

    def begin_of(self, epoch: int) -> EpochBegin | None:
        """As the others had it, if that is known."""
        if epoch not in self.streams or epoch not in self.draws:
            return None
        return EpochBegin(epoch, self.streams[epoch], self.draws[epoch])

    def put_back(self, epoch: int, draws: Draws) -> None:
        """Where this is known, the order of this epoch is drawn from here on as the others have drawn it."""
        if epoch in self.streams:
            RandomStreams.restore(self.streams[epoch])
        if epoch in self.draws:
            draws.restore(self.draws[epoch])

    def repeat(self, epoch: int, batches: int) -> None:
        """So many batches of this epoch are given once more."""
        self.repeats = {**self.repeats, epoch: self.repeats.get(epoch, 0) + batches}

    def passes_more(self, since: int) -> int:
        """How many the job's scripts make than there are batches, from this epoch on."""
        return sum(_from(since, self.repeats).values())

    def agree(self, collective: Collective) -> bool:
        """Have all members of a new world know the answers, and the repetitions, that one of them knows. Returns whether any of them
        was given an answer of its own.

        Raises:
            WorldBroken: nothing has changed.
        """
        world = collective.world
        mine = pickle.dumps((self.answers.state_dict(), self.repeats))
        row = [self.passes_more(0), *self.answers.present, len(mine), float(self.answers.has_own)]
        table = torch.zeros(world.size, len(row), dtype=torch.float64)
        table[world.rank] = torch.tensor(row, dtype=torch.float64)
        collective.sum_([table], "elasticdl.answers")
        known = [tuple(each[:3]) for each in table.tolist()]
        most = max(known)
        if any(each != most for each in known):
            teller = known.index(most)
            content = torch.zeros(int(table[teller, 3]), dtype=torch.uint8)
            if world.rank == teller:
                content.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            collective.sum_([content], "elasticdl.answers.known")
            answers, self.repeats = pickle.loads(content.numpy().tobytes())
            self.answers.load_state_dict(answers)
        return bool(table[:, 4].any())

    def compared(self) -> dict[str, Any]:
        """The random streams with which the present epoch began, as the script knows them."""
        return RandomStreams.compared(self.streams[max(self.streams)]) if self.streams else {}

    def dump(self) -> dict[str, Any]:
        kept = {"streams": dict(self.streams), "draws": dict(self.draws), "answers": self.answers.state_dict()}
        return {**kept, "repeats": self.repeats}

    def load(self, dumped: dict[str, Any]) -> None:
        self.streams, self.draws, self._seed = dict(dumped["streams"]), dict(dumped["draws"]), (-1, 0)
        self.answers.load_state_dict(dumped["answers"])
        self.repeats = dict(dumped.get("repeats", {}))


def _from(since: int, kept: dict[int, T]) -> dict[int, T]:
    return {epoch: each for epoch, each in kept.items() if epoch >= since}
