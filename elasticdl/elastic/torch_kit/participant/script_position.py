"""Where the job stands in the script, beside its progress in the data."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.data.draws import Draws
from elasticdl.elastic.torch_kit.data.own_loader import RandomStreams
from elasticdl.elastic.torch_kit.participant.agreements import Answers
from elasticdl.elastic.training.pieces import Piece


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

    def __init__(self, began_with: tuple[int, float] = (0, 0.0)) -> None:
        """``began_with``: of the optimizers, as the script has given them."""
        self.began_with = began_with
        self.marks: dict[int, float] = {}  # of the model at the beginning of an epoch, for the newest epochs
        self.streams: dict[int, bytes] = {}  # of an epoch, the random streams with which it begins
        self.draws: dict[int, bytes] = {}  # of an epoch, what else its order is drawn from
        self.answers = Answers()
        self.repeats: list[
            tuple[int, int, int]
        ] = []  # epoch, number of the first batch, and how many were given once more
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

    def compared(self) -> dict[str, Any]:
        """The random streams with which the present epoch began, as the script knows them."""
        return RandomStreams.compared(self.streams[max(self.streams)]) if self.streams else {}

    def dump(self) -> dict[str, Any]:
        kept = {"streams": dict(self.streams), "draws": dict(self.draws), "answers": self.answers.state_dict()}
        return {**kept, "began_with": self.began_with, "marks": dict(self.marks), "repeats": list(self.repeats)}

    def load(self, dumped: dict[str, Any]) -> None:
        self.streams, self.draws, self._seed = dict(dumped["streams"]), dict(dumped["draws"]), (-1, 0)
        self.answers.load_state_dict(dumped["answers"])
        self.began_with = dumped.get("began_with", self.began_with)
        self.marks = dict(dumped.get("marks", {}))
        self.repeats = list(dumped.get("repeats", []))


def _from(since: int, kept: dict[int, bytes]) -> dict[int, bytes]:
    return {epoch: each for epoch, each in kept.items() if epoch >= since}
