"""The gradients of a step, what its forward passes did to the model's buffers, and what workers tell each other with them.

All of it travels in one go. A collective only moves what it is given: the order of summation is decided here and in `Buckets`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy.typing as npt
import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core import agreement, vote
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.torch_kit.flat import strides_of
from elasticdl.elastic.torch_kit.gpu import HostCopy, PassTimer
from elasticdl.elastic.torch_kit.reduction.buckets import Buckets
from elasticdl.elastic.torch_kit.reduction.buffers import Buffers
from elasticdl.elastic.torch_kit.reduction.hooks import ParameterHooks
from elasticdl.elastic.torch_kit.reduction.named import Followers, NamedBuffers
from elasticdl.elastic.torch_kit.reduction.rides import Rides

# Further places in the vector of votes: this worker trains other parameters than in the last step; it has late gradients, made by the pass
# that has begun sums; its passes, and their square; the checksum of the names and shapes of what rides.
CHANGED, LATE, TWICE, PASSES, PASSES_SQUARED, RIDES = range(vote.VOTE_SIZE, vote.VOTE_SIZE + 6)
BALLOT = RIDES + agreement.SIZE
ROOM = 64  # numbers that may ride before a step needs a second collective, once


@dataclass(frozen=True, slots=True)
class Sums:
    """What a step's sums have told."""

    vote: Vote
    rides: Rides
    seconds: float  # that the passes took by the device's clock, or 0


class GradientReducer:
    """Owns the gradients of some parameters between two optimizer steps.

    A step: `open`, for each micro-batch `add` and `backward`, then `close`. After that ``parameter.grad`` holds the sum over the workers.

    Parameters that get no gradient in a step count as having a gradient of zero. Which of them are trained may change, on all
    workers alike: those that are frozen, unfrozen or added to the optimizer.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        modules: Iterable[torch.nn.Module],
        collective: Collective,
        *,
        leaves_missing_grads_none: bool = False,
        may_be_summed: bool = True,
        hooks_rest: bool = True,
        require_one: Callable[[str, str], None] | None = None,
    ) -> None:
        """``parameters``: all that the optimizer has at present. ``modules``: whose buffers are summed. ``leaves_missing_grads_none``: a parameter that no worker
        has a gradient of ends with none, as on one device, instead of with zeros. ``may_be_summed``: there may be other workers. ``hooks_rest``: see `ParameterHooks`.
        ``require_one``: called on all members if they differ in the first, with a line that says so; it raises an error."""
        self.hooks = ParameterHooks(parameters, rest=hooks_rest)
        self._all = parameters
        self._collective = collective
        self._require_one = require_one
        self._buffers = Buffers(modules, may_be_summed=may_be_summed)
        device = next((each.device for each in parameters()), torch.device("cpu"))
        self.passes = PassTimer(device)
        self._leaves_missing_grads_none = leaves_missing_grads_none
        self._votes = [0.0] * BALLOT  # this worker's, and after the sum those of all
        # A loss on a GPU stays there, so that nobody waits for it before the step's end.
        self._loss = None if device.type == "cpu" else torch.zeros(1, device=device)
        self._has_loss = False  # something of this step is there
        self._read_loss: HostCopy | None = None
        self._rides = Rides()
        self._room = ROOM
        self._small = torch.zeros(0)  # votes, what rides, and of each trained parameter the workers with a gradient
        self._trained: list[torch.nn.Parameter] = []
        self._deltas: list[torch.Tensor] = []  # of buffers, as they were when it was agreed on them
        self._agreed = -1  # version of the world whose members have found that they train the same parameters
        self._buckets: Buckets | None = None
        self._made = self._launched_at = 0  # backward passes of this step; the first of them that has begun sums
        self._before = self._expected = 0  # passes of the last step; of this one, if it is like the last two
        # In this world: sums begin within passes; a pass that is called the last is it.
        self._overlaps = self._is_trusted = True

    @property
    def followers(self) -> Followers:
        return self._buffers.followers

    @property
    def buffers(self) -> NamedBuffers:
        """Of the modules, those that there are."""
        return self._buffers.found

    # -- a step --

    def open(self) -> None:
        """A step begins; the gradients that are there count, unless `drop_gradients` is called."""
        self.hooks.put_back()
        if self._buckets is not None and self._buckets.forget():
            self.drop_buckets()
        self._votes = [0.0] * BALLOT
        self._rides = Rides()
        self._made = self._launched_at = 0
        if self._loss is not None:
            self._loss.zero_()
        self._has_loss, self._read_loss = False, None
        self._buffers.begin()
        self.passes.begin()

    def drop_gradients(self) -> None:
        for parameter in self._all():
            parameter.grad = None

    def begin_passes(self) -> None:
        """Of the step's micro-batches the first comes next."""
        self._buffers.begin_passes()

    def moved(self) -> list[torch.Tensor]:
        """What `reset_buffers` puts back."""
        every = [*self.buffers.find(anew=False), *self.followers.possible()]
        return [tensor for each in every if (tensor := each.tensor) is not None]

    def reset_buffers(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        self._buffers.reset()

    def add(self, loss: torch.Tensor | float, samples: int, *, weight: float, is_first: bool, passes: int = 1) -> None:
        """Count a micro-batch of this many samples with this mean loss; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step. ``passes``: that it was in fact.

        Raises:
            UserError: a buffer has come, gone or changed its shape.
        """
        self._votes[vote.SAMPLES] += samples
        if not isinstance(loss, torch.Tensor):
            self._votes[vote.LOSS] += loss * samples
        elif self._loss is None:
            self._votes[vote.LOSS] += loss.item() * samples
        else:
            self._loss += loss.detach().to(self._loss) * samples
            self._has_loss, self._read_loss = True, None
        alone = self._collective.world.size == 1
        self._buffers.add(weight, is_first=is_first, alone=alone, samples=samples, passes=passes)

    def backward(self, run: Callable[[], object], *, last: bool | None = None) -> None:
        """Have ``run`` make a backward pass, of which the hooks of parameters hear nothing.

        ``last``: it makes the step's last gradients, and they are summed meanwhile. None: it does if the last two steps had so many passes, on all
        workers. A further pass costs a second sum; after one the passes are counted whatever ``last`` says. A world that breaks meanwhile is told of by `close`.
        """
        self._made += 1
        if last is None or not self._is_trusted:
            last = last is not False and self._made == self._expected
        world = self._collective.world
        launching: AbstractContextManager[None] = nullcontext()
        if last and world.size == 1 and self._loss is not None and self._has_loss:
            # It comes to the host while the device is on the backward pass, which is not waited for.
            self._read_loss = HostCopy(self._loss)
        elif last and self._overlaps and self._buckets is not None and self._agreed == world.version:
            self._launched_at, launching = self._launched_at or self._made, self._buckets.launching()
        with self.hooks.aside(), launching:
            run()

    def begin_launched(self) -> None:
        """Before another collective of all workers: sums that some of them have begun within a pass, all begin before it.

        Raises:
            WorldBroken: gradients are gone.
        """
        if self._launched_at and self._buckets is not None and self._agreed == self._collective.world.version:
            self._buckets.begin_early()

    def withdraw(self, parameters: Iterable[torch.Tensor]) -> None:
        """The script clears the gradients of these before the step is closed. All workers do so."""
        if self._buckets is not None:
            self._buckets.withdraw(parameters)

    def ride(self, name: str, numbers: npt.ArrayLike) -> None:
        """Have a few numbers summed with this step's gradients. All members give the same names and shapes in a step."""
        self._rides.add(name, numbers)

    def close(
        self,
        *,
        leaving: bool = False,
        stopping: bool = False,
        share: float | None = None,
        batch: int = 0,
        state: int = 0,
        scale: float = 1.0,
    ) -> Sums:
        """Sum over the world all that was added.

        ``leaving``, ``stopping``: this worker's votes. ``share``: of this worker in a step whose batches are its own, by which its running statistics count; None
        in any other. ``batch``, ``state``: checksums of the global batch and of the training state. ``scale``: factor on the gradients' sum; 1 if
        losses were weighed by sample counts already.

        Raises:
            UserError: the workers train different parameters.
            WorldBroken: gradients are gone, or a newcomer is refused; parameters and buffers are untouched.
        """
        self._votes[vote.LEAVING], self._votes[vote.STOPPING] = leaving, stopping
        vote.mark(self._votes, batch, state)
        self._buffers.close(share)
        self.passes.end()
        if self._collective.world.size == 1:
            self._complete_alone(scale)
        else:
            self._sum(scale)
        self._buffers.update(round(self._votes[vote.SAMPLES]))
        self._count_passes()
        return Sums(self._vote(), self._rides, self.passes.seconds)

    def end(self, state: int = 0) -> Vote:
        """Take part in a step without anything to add: this worker's training is over. ``state``: as for `close`.

        Raises:
            WorldBroken: a member was lost.
        """
        self.open()
        self.drop_gradients()
        self._votes[vote.ENDED] = 1.0
        vote.mark(self._votes, 0, state)
        if self._collective.world.size > 1:
            self._sum(1.0)
        return self._vote()

    # -- details --

    def _vote(self) -> Vote:
        if self._loss is not None and (self._has_loss or self._collective.world.size > 1):
            self._votes[vote.LOSS] += (self._read_loss or HostCopy(self._loss)).wait().item()
        return Vote.of(self._votes)

    def _count_passes(self) -> None:
        """What is expected of the next step. Where workers differ, they do of nothing."""
        are_alike = self._collective.world.size * self._votes[PASSES_SQUARED] == self._votes[PASSES] ** 2
        made = self._made if are_alike else 0
        self._before, self._expected = made, made if made == self._before else 0

    def _complete_alone(self, scale: float) -> None:
        for parameter in self._present():
            if parameter.grad is None:
                parameter.grad = None if self._leaves_missing_grads_none else torch.zeros_like(parameter)
            elif parameter.grad.is_sparse and self._buckets is not None:  # as it was in the larger world
                parameter.grad = parameter.grad.to_dense() * scale
            elif scale != 1.0:
                parameter.grad.mul_(scale)

    def _sum(self, scale: float) -> None:
        if self._agreed != self._collective.world.version:
            self._agree()
            self._agreed, self._overlaps, self._is_trusted = self._collective.world.version, True, True
            self._before = 0  # as on a newcomer: all members expect the same
        if self._buckets is None:
            self._small = torch.zeros(BALLOT + self._room + len(self._trained))
            tail = [*self._deltas, self._small, *([] if self._loss is None else [self._loss])]
            self._buckets = Buckets(self._trained, tail, self._collective)
        buckets, riding = self._buckets, self._rides.numbers()
        self._votes[CHANGED] = self._has_changed()
        self._votes[PASSES], self._votes[PASSES_SQUARED] = self._made, self._made**2
        buckets.begin_early()
        self._votes[LATE] = is_late = buckets.take_late()
        self._votes[TWICE] = is_late and self._launched_at == self._made
        if riding:
            self._votes[RIDES:] = agreement.pieces(self._rides.form())
        room = riding if len(riding) <= self._room else []
        self._small.numpy()[:] = [*self._votes, *room, *[0.0] * (self._room - len(room)), *buckets.present()]
        buckets.finish(scale)
        sums = self._small.tolist()
        self._votes, workers = sums[:BALLOT], sums[BALLOT + self._room :]
        if self._votes[LATE]:
            workers = buckets.sum_late(scale, workers)
            # Else each step would take two sums, as with reentrant checkpoints.
            self._overlaps, self._is_trusted = not self._votes[TWICE], False
        if self._leaves_missing_grads_none:
            for parameter, number in zip(self._trained, workers, strict=True):
                parameter.grad = parameter.grad if number else None
        if self._votes[CHANGED]:
            self._sum_changed(scale)
        if not agreement.all_equal(self._votes[RIDES:], self._collective.world.size):
            self._rides.are_alike = False
        elif riding:
            ridden = sums[BALLOT : BALLOT + len(room)]
            if not room:
                self._collective.sum_([beside := torch.tensor(riding)], "elasticdl.rides")
                self._make_room(len(riding))
                ridden = beside.tolist()
            self._rides.summed(ridden)

    def _make_room(self, numbers: int) -> None:
        if numbers != self._room:
            self._room = numbers
            self.drop_buckets()

    # -- which parameters are trained --

    def _present(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._all() if parameter.requires_grad]

    def _has_changed(self) -> bool:
        return _differ(self._present(), self._trained) or _differ(self._buffers.deltas, self._deltas)

    def _agree(self) -> None:
        """From now on the present parameters are reduced."""
        parameters = list(self._all())
        trained = [(i, each.shape, _order(each), each.dtype) for i, each in enumerate(parameters) if each.requires_grad]
        buffers = [(each.shape, each.dtype) for each in self._buffers.deltas]
        held = {
            f"the workers train different parameters, of which this one has {len(trained)}: freeze, unfreeze and add them "
            "alike on all, by the epoch or the step, and not by what one worker has seen of a batch": repr(trained),
            "the models of the workers have different buffers: register them when the model is made, with shapes that do not "
            "depend on what a worker has computed": repr(buffers),
        }
        checksums = [zlib.crc32(each.encode()) for each in held.values()]
        sums = torch.tensor([number for each in checksums for number in agreement.pieces(each)])
        self._collective.sum_([sums], "elasticdl.trained")
        for at, (line, mine) in enumerate(held.items()):
            if not agreement.all_equal(sums.tolist()[at * agreement.SIZE :], self._collective.world.size):
                if self._require_one is not None:
                    self._require_one(mine, line)
                raise UserError(line)
        present = self._present()
        for each in present:
            if each.is_floating_point() and each.itemsize == 1:
                raise UserError(
                    f"a parameter of shape {tuple(each.shape)} is trained in {str(each.dtype).removeprefix('torch.')}, whose gradients can't be "
                    "summed: keep it in bfloat16 or float32, and convert it where it is used"
                )
        self._make_room(ROOM)  # which a newcomer has
        if self._has_changed():
            self._trained, self._deltas = present, self._buffers.deltas
            self.drop_buckets()

    def _sum_changed(self, scale: float) -> None:
        """Some worker trains other parameters than before, or has other buffers: those that are new have not been summed."""
        before, deltas = {id(parameter): parameter for parameter in self._trained}, self._deltas
        self._agree()
        new = [parameter for parameter in self._trained if before.pop(id(parameter), None) is None]
        for parameter in before.values():  # which are frozen now
            parameter.grad = None
        moves = self._deltas if _differ(self._deltas, deltas) else []
        if new or moves:
            Buckets(new, moves, self._collective, launches=False).finish(scale)

    def drop_buckets(self) -> None:
        """The parameters have no hooks of sums any more, and the memory of sums is free."""
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None


def _differ(present: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    return [*map(id, present)] != [*map(id, before)]


def _order(parameter: torch.Tensor) -> list[int]:
    """In which its elements lie, and those of its gradient."""
    return [stride for size, stride in zip(parameter.shape, strides_of(parameter), strict=True) if size > 1]
