"""What one front end adds to a `elasticdl.elastic.torch_kit.participant.Participant`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy.typing as npt
import torch

from elasticdl.elastic.core.plan import MicroBatch, Progress, StepPlan
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.tensors import HostCopy
from elasticdl.elastic.training.attributes import Noted


class Outcome(Enum):
    """What becomes of the open batches."""

    MADE = "the gradients are everybody's; the parameters may change"
    BEHIND = "the other workers have made this step; this worker is on its way to where they are"
    DROPPED = "the script must be given these batches again"


def _contents(tensor: torch.Tensor) -> tuple[int, int]:
    """As long as the tensor is kept, these differ from those of any other, and after a change in place."""
    return tensor.data_ptr(), tensor._version


@dataclass(slots=True)
class OpenBatch:
    """A batch that the script has been given, of whose step the parameters have not changed yet."""

    batch: GlobalBatch
    part: MicroBatch
    sample: Any = None
    is_repeated: bool = False  # given once more, or will be
    backwards: int = 0  # backward passes that were made of it
    most: int = 0  # samples of the part when it was given, which are those of one pass
    noted: Noted | None = None  # in attributes, before the script has made anything of it
    losses: list[tuple[HostCopy, float]] = field(default_factory=list)  # of its passes, and how each is weighed
    begun: tuple[tuple[int, int], HostCopy] | None = None  # of the pass that is being made: which loss, and its copy

    def begin_loss(self, loss: torch.Tensor) -> None:
        """A pass is made of this loss next. It comes to the host while the device is on that pass, which nobody has to wait for."""
        self.begun = _contents(loss), HostCopy(loss.detach().sum())

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """A pass was made, or is made next, of this loss."""
        of, copy = self.begun or (None, None)
        self.begun = None
        if copy is None or of != _contents(loss):
            copy = HostCopy(loss.detach().sum())
        self.losses.append((copy, weight))

    @property
    def objective(self) -> float:
        """The weighed sum of the losses of its passes."""
        return sum(float(copy.wait()) * weight for copy, weight in self.losses)

    def begin_again(self) -> None:
        """Its gradients are made again, of another part."""
        self.losses.clear()

    def forget(self) -> None:
        """Its step is made: what the script has computed of it may go."""
        self.sample = None


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Samples of a batch as the script's loader gives them; ``weight``: their part of the mean over the batch."""

    content: Any
    weight: float
    samples: int


def plan_of(open_batches: Sequence[OpenBatch], progress: Progress) -> StepPlan:
    """The step on these batches."""
    first, last = open_batches[0].batch, open_batches[-1].batch
    whole = last.indices if first is last else [index for given in open_batches for index in given.batch.indices]
    after = Progress(last.epoch, last.end, progress.step + 1, progress.samples + len(whole))
    parts = tuple(given.part for given in open_batches)
    return StepPlan(first.epoch, progress.step + 1, len(whole), after, parts, last.is_last, whole)


class Host:
    """A front end, as its participant sees it. It must have `left` and `remake`; the other methods have a default.

    What a front end calls, in this order; docs/worker_side.md says more, under "A trainer of another library":

    - `ScriptRuntime.init_in_place`, and `train_in_place` with `JoinedHost.finish` (`elasticdl.elastic.training.runtime`; the process's own is
      `elasticdl.elastic.torch_kit.tensors.own`).
    - `Participant.join`; the `ScriptPosition` is the value ``place`` of the `LoopState`. Where another's state has come by that, the worker is catching up.
    - For each epoch `Participant.begin_epoch` and `Participant.batches`. A loop that passes by what is done calls `Participant.arrive` before
      them (`elasticdl.elastic.torch_kit.movable.MovableHost`). One that catches up by stand-ins draws as the others have drawn.
    - For each pass `Participant.backward`; before gradients are looked at, `Participant.settle`; after the update `Participant.close`.
      While it is catching up, none of these, and no update.
    - After the last step `LoopState.last_step_made`.

    What loads a batch may draw from the global random streams, and so may a pass. A host puts them back after both (`Participant.apart`), so
    that all workers go on to draw alike.
    """

    # -- batches --

    def next_number(self, number: int) -> int:
        """The number of the batch that comes next in its epoch: ``number``, unless batches are given again."""
        return number

    def asks_for(self, batch: GlobalBatch) -> bool:
        """The script asks for this batch. Returns whether it has given up the batches before, of which it made no step."""
        return False

    def stands_before(self, batch: GlobalBatch) -> None:
        """The script is between two steps, and asks for this batch: from here a newcomer goes on. The world changes next, perhaps."""

    def owes(self, batch: GlobalBatch) -> bool:
        """Whether this worker, which is catching up, is given a stand-in more before it stands before this batch: others were given one again."""
        return False

    def passed_by(self, batch: GlobalBatch) -> None:
        """The script is given a stand-in next, in the place of this batch."""

    def loading(self, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Around the loading of this worker's part: it draws random numbers."""
        return contextlib.nullcontext()

    def opened(self, batch: GlobalBatch, part: MicroBatch, sample: Any) -> OpenBatch:
        """The script is given ``sample``, its part of this batch."""
        return OpenBatch(batch, part, sample)

    def step_over(self) -> None:
        """The parameters have changed by the open batches, or stay as they are for good."""

    # -- a step --

    def rides(self) -> Mapping[str, npt.ArrayLike]:
        """Small numbers, by name, that are summed with the gradients of the open batches; of the same names and shapes on all workers."""
        return {}

    def heard(self, rides: Rides) -> bool:
        """The sums over all workers. Returns whether the step may be made of these batches. If not, its gradients are made again, by `remake`.

        Raises:
            UserError: the workers can't make one step.
        """
        return True

    # -- worlds --

    def rank_known(self) -> None:
        """This worker's rank may be another one, or is no longer that of a worker that catches up."""

    def arrives(self, batch: GlobalBatch | None) -> None:
        """This worker stands where the job stands; the job's state takes effect next. ``batch``: the next one, if it is within an epoch."""

    def arrived(self, batch: GlobalBatch | None) -> None:
        """It has the job's state."""

    def left(self) -> None:
        """This worker leaves for good. Its process ends with status 0."""
        raise NotImplementedError

    # -- a step that is torn --

    def as_before_step(self) -> AbstractContextManager[None]:
        """Around the way to the next world, when a step is torn: what the script has changed for the step is as before it, as others may be sent
        the state. Afterwards it is as the script has left it."""
        return contextlib.nullcontext()

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        """These batches, of which this worker has these samples now, are made again next."""

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        """Add the gradients of ``sample``, a piece of a batch, by `Participant.backward` with this weight.

        Raises:
            WorldBroken: the step is torn again.
        """
        raise NotImplementedError

    def cannot_remake(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        """`remake` has raised this. Unless this method raises, the step is dropped, and the script is given the batches again."""
        raise error
