"""What the hosts of trainers have in common whose loop can begin anywhere: it passes by what the job has done, and goes on from there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from elasticdl.elastic.torch_kit.own_loader import GlobalBatch
from elasticdl.elastic.torch_kit.participant import JoinedHost, Participant
from elasticdl.elastic.torch_kit.tensors import ElasticContext, RandomStreams
from elasticdl.elastic.training.pieces import Piece

# Where a job stands that has no further step.
NO_EPOCH = 2**31


class TrainerPlace(Piece):
    """Where a trainer stands between two steps: its next batch, the random streams, and numbers of its own.

    What is received waits until the trainer stands there, as it may be in the middle of a step. A torn step is made again in place: nothing
    has to be undone.
    """

    name = "trainer"
    is_value = True
    shows_the_way = True

    def __init__(self) -> None:
        self.received: dict[str, Any] | None = None
        self.epoch = self.batch = 0  # the number of the next batch in its epoch
        self.outside = b""  # random streams, as the script knows them outside of batches

    @abstractmethod
    def read(self) -> dict[str, Any]:
        """The trainer's numbers, as they were when `note` was called; this may be in the middle of the step after it."""

    @abstractmethod
    def apply(self, numbers: dict[str, Any]) -> None:
        """Set those that `read` has given, on another worker perhaps."""

    def note(self, epoch: int, batch: int) -> None:
        """The trainer is between two steps."""
        self.epoch, self.batch = epoch, batch

    def arrive(self) -> None:
        """The trainer stands where the job stands."""
        content, self.received = self.received, None
        assert content is not None, "a place was received"
        self.apply(content)
        self.outside = content["outside"]
        self.note(content["epoch"], content["batch"])

    # -- as a piece of the training state --

    def keep(self) -> None: ...

    def undo(self) -> None: ...

    def dump(self) -> dict[str, Any]:
        outside = self.outside or RandomStreams.capture()
        return {"epoch": self.epoch, "batch": self.batch, **self.read(), "outside": outside}

    def load(self, dumped: dict[str, Any]) -> None:
        self.received = dumped


class MovableHost(JoinedHost):
    """A host that is called where the trainer's loop comes to an epoch (`go_to`), asks for its batches (`take`), and ends (`end_of_training`)."""

    def __init__(self, job: ElasticContext, on_left: Callable[[], None], place: TrainerPlace) -> None:
        """``place``: is among the values of the training state."""
        super().__init__(job, on_left)
        self._place = place
        self._begins = (0, 0)  # the present epoch, and the number of the batch that it is begun with

    def join(self, participant: Participant) -> None:
        """Be in a world. On rank 0 of the first one, which has its own state, the trainer stands where the job stands."""
        self._joined = participant
        self._place.outside = RandomStreams.capture()
        participant.join()
        if self._place.received is None:
            participant.arrive()

    def go_to(self, epoch: int, first: int = 0) -> int | None:
        """The number of the batch to begin this epoch with, which is ``first`` unless the job stands elsewhere; None: not in this epoch."""
        participant, received = self.participant, self._place.received
        participant.close()  # a callback may have ended the last epoch in the middle of a step
        if participant.is_catching_up and received is not None:
            if epoch < received["epoch"]:
                return None
            participant.arrive()
            first = received["batch"]
        self._begins = epoch, first
        return first

    def take(self, draw: Callable[[int], Sequence[GlobalBatch]] | None = None) -> Iterator[Any]:
        """The batches of the epoch that `go_to` was called for, each as this worker's part of it. ``draw``: the order, as `Participant.begin_epoch`."""
        participant, (epoch, first) = self.participant, self._begins
        participant.begin_epoch(epoch, draw)
        if first and (self._place.epoch, self._place.batch) == self._begins:
            # It has come within the epoch, and has drawn the order once more.
            RandomStreams.restore(self._place.outside)
        return participant.batches(first)

    def end_of_training(self) -> None:
        """There is no further step."""
        if self.is_catching_up and self._place.received is not None:
            self.participant.arrive()
        self._place.note(NO_EPOCH, 0)
        self.participant.state.last_step_made()

    # -- for the participant --

    def stands_before(self, batch: GlobalBatch) -> None:
        # A step of one worker is not torn: its state is sent from here alone, with the streams as they are then.
        self._place.outside = RandomStreams.capture() if self.job.size > 1 else b""
        self._place.note(batch.epoch, batch.number)

    def loading(self, batch: GlobalBatch) -> AbstractContextManager[None]:
        return self.participant.apart(batch)

    def arrived(self, batch: GlobalBatch | None) -> None:
        if self._place.received is not None:
            self._place.arrive()
            RandomStreams.restore(self._place.outside)
        at = self._place.epoch, self._place.batch
        assert batch is None or at == (batch.epoch, batch.number), f"the job stands at {at}, and this worker at {batch}"
