"""The gradients of a step, what its forward passes did to the model's buffers, and what workers tell each other with them.

All of it travels in one go. A collective only moves what it is given: the order of summation is decided here and in `Buckets`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective, Transfer
from elasticdl.elastic.core import training_step as vote
from elasticdl.elastic.core.plan import WHOLE, Spread
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.training_step import SIZE, Vote, all_equal, summands
from elasticdl.elastic.torch_kit.passes import Buffers, FrozenParameters, Remedy, WeighedGradients
from elasticdl.elastic.torch_kit.tensors import (
    HostCopy,
    PassTimer,
    aligned,
    by_kind,
    flat_views,
    is_sharded,
    like,
    local,
    settled,
    strides_of,
)

# Gradients in flat buckets, each summed over the world while the backward pass makes those of the next.
#
# As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020): buckets are filled in the reverse order of the parameters, and
# begun in that order on all workers, also on one that has no gradients. The order is all that workers must have in common: one may
# begin its buckets during the backward pass, and another after it.
#
# Small tensors travel at the end of *closing* buckets, which come last and begin in `finish`: until then they may be written.
#
# A gradient that comes after its sum has begun is *late*. Sums are linear, so late gradients are summed by themselves, and added.
#
# Results reach ``parameter.grad`` only once all have arrived, so a torn step changes nothing but gradients.

STEP = "elasticdl.step"  # one name for all steps: a worker that makes one meets another that has ended
BUCKET_BYTES = 4 << 20  # benchmarks/results/HISTORY.md says why


class _Bucket:
    """Gradients of one kind as flat memory. ``tail``: further tensors of that kind, which travel at its end."""

    def __init__(self, parameters: list[torch.nn.Parameter], tail: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self._tail = tail
        here = [local(each) for each in parameters]
        self.flat, views = flat_views([*here, *tail])
        self._tail_views = views[len(parameters) :]
        # As backward passes make them: a fused optimizer takes parameter and gradient for arrays in one order.
        self._views = [view.as_strided(each.shape, strides_of(each)) for view, each in zip(views, here, strict=False)]
        self._gradients = [like(each, view) for each, view in zip(parameters, self._views, strict=True)]

    @torch.no_grad()
    def fill(self, present: dict[int, bool]) -> None:
        """Move the gradients here. A parameter without one counts as having a gradient of zero. ``present``: takes, by its id, whether it has one."""
        gradients, places = list(self._tail), list(self._tail_views)
        for number, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            gradient: Any = parameter.grad
            parameter.grad = None
            present[id(parameter)] = gradient is not None
            if gradient is None:
                view.zero_()
                continue
            if is_sharded(gradient):
                gradient = settled(parameter, gradient)
                as_before: Any = self._gradients[number]
                if gradient.placements != as_before.placements:  # it is a sum yet to be made
                    self._gradients[number] = like(parameter, view, gradient.placements)
            here = local(gradient)
            gradients.append(here.to_dense() if here.is_sparse else here)
            places.append(view)
        if places:
            torch._foreach_copy_(places, gradients)

    @torch.no_grad()
    def hand_out(self) -> None:
        """Make the sums the gradients."""
        if self._tail:
            torch._foreach_copy_(self._tail, self._tail_views)
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient


class Buckets:
    """The gradients of some parameters, and small tensors beside them, on their way through the world."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        tail: Sequence[torch.Tensor],
        collective: Collective,
        *,
        launches: bool = True,
    ) -> None:
        """``tail``: tensors that are summed in place; complete when `finish` is called. ``launches``: sums may begin within backward passes."""
        self._collective = collective
        self._parameters = parameters
        rest = by_kind(tail)
        closing: list[_Bucket] = []
        self._buckets: list[_Bucket] = []
        for kind, of_kind in by_kind(reversed(parameters)).items():
            *others, last = _cut(of_kind)
            self._buckets += [_Bucket(run, []) for run in others]
            (closing if kind in rest else self._buckets).append(_Bucket(last, rest.pop(kind, [])))
        self._early = [each for bucket in self._buckets for each in bucket.parameters]
        self._early_buckets = len(self._buckets)
        self._number = {id(each): i for i, bucket in enumerate(self._buckets) for each in bucket.parameters}
        self._buckets += [*closing, *(_Bucket([], of_kind) for of_kind in rest.values())]
        self._missing: list[set[int]] = []  # of each early bucket, the parameters whose gradients are not there yet
        self._transfers: list[Transfer] = []
        self._failure: WorldBroken | None = None  # in the middle of a backward pass
        self._present: dict[int, bool] = {}  # whether a parameter had a gradient when its sum began, by its id
        self._late: dict[int, torch.Tensor] = {}  # gradients, by the ids of early parameters
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for parameter in (self._early if launches else ())
        ]

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Within, a backward pass makes what may be the last gradients of this step. A world that breaks is told of by `finish`."""
        early = self._buckets[: self._early_buckets]
        self._missing = [{id(parameter) for parameter in bucket.parameters} for bucket in early]
        try:
            yield
        finally:
            self._missing = []

    def have_begun(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether this worker has given a gradient of one of these to its sum."""
        return any(self._present.get(id(each)) for each in parameters)

    def begin_early(self) -> None:
        """Begin what could have begun within the backward pass. Gradients that come after this are late.

        Raises:
            WorldBroken: gradients are gone.
        """
        if self._failure is not None:
            raise self._failure
        while len(self._transfers) < self._early_buckets:
            self._begin_next()

    def take_late(self) -> bool:
        """After `begin_early`. Returns whether this worker has late gradients."""
        for parameter in self._early:
            if parameter.grad is not None:
                self._late[id(parameter)], parameter.grad = parameter.grad, None
        return bool(self._late)

    def present(self) -> list[bool]:
        """Of each parameter, whether this worker has given a gradient to its sum, or is about to, or has a late one."""
        return [
            self._present.get(id(each), each.grad is not None) or id(each) in self._late for each in self._parameters
        ]

    def finish(self) -> None:
        """Sum what is not under way yet, wait for all, and hand the sums out.

        Raises:
            WorldBroken: gradients are gone; nothing else has changed.
        """
        while len(self._transfers) < len(self._buckets):
            self._begin_next()
        self._collective.finish(self._transfers)
        self._transfers = []
        for bucket in self._buckets:
            bucket.hand_out()

    @torch.no_grad()
    def sum_late(self) -> None:
        """Add what has come late, after `finish`, where any member says that it has some.

        Raises:
            WorldBroken: gradients are gone.
        """
        sums = [each.grad for each in self._early]
        for parameter in self._early:  # some of which may be frozen by now
            parameter.grad = self._late.get(id(parameter))
        Buckets(self._early, [], self._collective, launches=False).finish()
        for parameter, before in zip(self._early, sums, strict=True):
            assert before is not None, "sums were handed out"
            assert parameter.grad is not None, "these, too"
            parameter.grad = before.add_(parameter.grad)

    def forget(self) -> bool:
        """A step begins; the last one may be torn. Returns whether a transfer that was left alone may still write here."""
        transfers, self._transfers = self._transfers, []
        self._failure = None
        self._present.clear()
        self._late.clear()
        return any(map(self._collective.in_flight, transfers))

    def close(self) -> None:
        """The parameters are as if they had never been here."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._missing or (number := self._number[id(parameter)]) < len(self._transfers):
            return
        self._missing[number].discard(id(parameter))
        try:
            while (number := len(self._transfers)) < self._early_buckets and not self._missing[number]:
                self._begin_next()
        except WorldBroken as failure:
            self._failure, self._missing = failure, []

    def _begin_next(self) -> None:
        number = len(self._transfers)
        bucket = self._buckets[number]
        bucket.fill(self._present)
        self._transfers.append(self._collective.begin_sum(bucket.flat, f"{STEP}.{number}"))


def _cut(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Into runs of about `BUCKET_BYTES`."""
    run: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        run.append(parameter)
        size += aligned(local(parameter)) * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run


# Small numbers that travel with the gradients of a step: logged values, losses, counts.

Numbers = npt.NDArray[np.float64]


class Rides:
    """Of one step: this worker's, and after the sum those of all."""

    def __init__(self) -> None:
        self._of: dict[str, Numbers] = {}
        self.are_alike = True  # all workers have the same names and shapes; else each has its own numbers here

    def __getitem__(self, name: str) -> Numbers:
        """Raises:
        UserError: the workers have different ones.
        """
        if not self.are_alike:
            raise UserError(
                f"the workers tell each other different numbers with a step's gradients, this one {', '.join(sorted(self._of)) or 'none'}: let what "
                "is logged or counted in a step not depend on what one worker has seen of a batch"
            )
        return self._of[name]

    def add(self, name: str, numbers: npt.ArrayLike) -> None:
        self._of[name] = np.asarray(numbers, np.float64)

    def form(self) -> int:
        """A checksum of names and shapes."""
        return zlib.crc32(repr([(name, self._of[name].shape) for name in sorted(self._of)]).encode())

    def numbers(self) -> list[float]:
        """Each as two of float32. A number of one worker, to which the others add zeros, keeps nearly all its digits of float64; a sum of
        several workers' numbers is rounded as one of float32."""
        if not self._of:
            return []
        every = np.concatenate([self._of[name].ravel() for name in sorted(self._of)])
        high = every.astype(np.float32)
        low = np.subtract(every, high, out=np.zeros_like(every), where=np.isfinite(high))
        return [*high.tolist(), *low.tolist()]

    def summed(self, numbers: Sequence[float]) -> None:
        """These are the sums of what `numbers` has given."""
        every, start = np.array(numbers).reshape(2, -1).sum(0), 0
        for name, own in sorted(self._of.items()):
            self._of[name] = every[start : start + own.size].reshape(own.shape)
            start += own.size


# Further places in the vector of votes: this worker trains other parameters than in the last step; it has late gradients; its passes, and their
# square; the checksum of the names and shapes of what rides.
CHANGED, LATE, PASSES, PASSES_SQUARED, RIDES = range(vote.VOTE_SIZE, vote.VOTE_SIZE + 5)
BALLOT = RIDES + SIZE
ROOM = 256  # numbers that may ride; more take a second collective in each step


@dataclass(frozen=True, slots=True)
class Sums:
    """What a step's sums have told."""

    vote: Vote
    rides: Rides
    seconds: float  # that the passes took by the device's clock, or 0


class GradientReducer:
    """Owns the gradients of some parameters between two optimizer steps.

    A step: `open`, for each micro-batch `add` and `backward`, then `close`. After that ``parameter.grad`` holds the sum over the workers.

    A parameter that no worker has a gradient of ends with none, as on one device. Which parameters are trained may change, on all
    workers alike: those that are frozen, unfrozen or added to the optimizer.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        modules: Iterable[torch.nn.Module],
        collective: Collective,
        *,
        refuses_moved: bool = True,
        remedy: Remedy | None = None,
        require_one: Callable[[str, str], None] | None = None,
        spread: Spread = WHOLE,
    ) -> None:
        """``parameters``: all that the optimizer has at present. ``modules``: whose buffers are summed. ``refuses_moved``: by a
        forward pass, of the parameters that are not trained. ``remedy``: for gradients that were made
        otherwise than by `backward`, which are refused; None: they are not.
        ``require_one``: called on all members if they differ in the first, with a line that says so; it raises an error.
        ``spread``: of this worker's processes."""
        self.weighed = WeighedGradients(remedy)
        self._all = parameters
        self._collective = collective
        self._require_one = require_one
        self._spread = spread
        self._inside = collective.inside
        self._buffers = Buffers(modules)
        self._frozen = FrozenParameters(modules if refuses_moved else ())
        device = next((each.device for each in parameters()), torch.device("cpu"))
        self.passes = PassTimer(device)
        self._votes = [0.0] * BALLOT  # this worker's, and after the sum those of all
        # A loss on a GPU stays there, so that nobody waits for it before the step's end.
        self._loss = None if device.type == "cpu" else torch.zeros(1, device=device)
        self._has_loss = False  # something of this step is there
        self._read_loss: HostCopy | None = None
        self._rides = Rides()
        self._small = torch.zeros(0)  # votes, what rides, and of each trained parameter the workers with a gradient
        self._trained: list[torch.nn.Parameter] = []  # by all members
        self._found_in = -1  # version of the world in which the buffers were found last
        self._present_before: list[torch.nn.Parameter] = []  # that were trained then
        self._deltas: list[torch.Tensor] = []  # of buffers, as they were when it was agreed on them
        self._agreed = -1  # version of the world whose members have found that they train the same parameters
        self._buckets: Buckets | None = None
        self._made = 0  # backward passes of this step
        self._has_launched = False  # one of them has begun sums
        self._before = self._expected = 0  # passes of the last step; of this one, if it is like the last two
        self._overlaps = True  # in this world sums begin within passes

    # -- a step --

    def open(self) -> None:
        """A step begins; the gradients that are there count, unless `drop_gradients` is called."""
        if self._buckets is not None and self._buckets.forget():
            self.drop_buckets()
        self._votes = [0.0] * BALLOT
        self._rides = Rides()
        self._made, self._has_launched = 0, False
        if self._loss is not None:
            self._loss.zero_()
        self._has_loss, self._read_loss = False, None
        every, version = list(self._all()), self._collective.world.version
        present = [each for each in every if each.requires_grad]
        self.weighed.begin(every)
        if version != self._found_in or _differ(present, self._present_before):  # with new parameters come buffers
            self._found_in, self._present_before = version, present
            self._buffers.find()
        else:
            self._buffers.begin()
        self.passes.begin()

    def drop_gradients(self) -> None:
        every = list(self._all())
        for parameter in every:
            parameter.grad = None
        self.weighed.begin(every)

    def begin_passes(self) -> None:
        """A micro-batch comes next, and behind it perhaps more."""
        self._frozen.begin()

    def moved(self) -> list[torch.Tensor]:
        """What `reset_buffers` puts back."""
        return self._buffers.present()

    def reset_buffers(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        self._buffers.reset()

    def add(self, loss: torch.Tensor | float, samples: int, *, weight: float, is_first: bool) -> None:
        """Count a micro-batch of this many samples with this mean loss; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step.

        Raises:
            UserError: a buffer has changed its shape, or has no mean, or the forward pass has changed a parameter that is not trained.
        """
        if not self._spread.counts:  # another process of this worker has the same samples, and counts them
            samples, weight = 0, 0.0
        is_first = is_first and self._inside.rank == 0
        self._votes[vote.SAMPLES] += samples
        if not isinstance(loss, torch.Tensor):
            self._votes[vote.LOSS] += loss * samples
        elif self._loss is None:
            self._votes[vote.LOSS] += loss.item() * samples
        else:
            self._loss += loss.detach().to(self._loss) * samples
            self._has_loss, self._read_loss = True, None
        self._frozen.require_unchanged()
        alone = self._is_alone
        self._buffers.add(weight, is_first=is_first, alone=alone)

    def backward(self, run: Callable[[], object], *, last: bool | None = None) -> None:
        """Have ``run`` make a backward pass.

        ``last``: it makes the step's last gradients, and they are summed meanwhile. None: it does if the last two steps had so many passes, on all
        workers. A further pass costs a second sum, and after one no sum begins within a pass in this world. A world that breaks meanwhile is told of by `close`.

        Raises:
            UserError: gradients are there that no such pass has made, or the forward pass has changed a parameter that is not trained.
        """
        self._frozen.require_unchanged()
        self._made += 1
        if last is None:
            last = self._made == self._expected
        world = self._collective.world
        launching: AbstractContextManager[None] = nullcontext()
        if last and self._is_alone and self._loss is not None and self._has_loss:
            # It comes to the host while the device is on the backward pass, which is not waited for.
            self._read_loss = HostCopy(self._loss)
        elif last and world.size > 1 and self._overlaps and self._buckets is not None and self._agreed == world.version:
            self._has_launched, launching = True, self._buckets.launching()
        self.weighed.require()
        with launching:
            run()
        self.weighed.accept()

    def begin_launched(self) -> None:
        """Before another collective of all workers: sums that some of them have begun within a pass, all begin before it.

        Raises:
            WorldBroken: gradients are gone.
        """
        if self._has_launched and self._buckets is not None and self._agreed == self._collective.world.version:
            self._buckets.begin_early()

    def require_not_begun(self, parameters: Iterable[torch.Tensor]) -> None:
        """The script clears the gradients of these before the step is closed.

        Raises:
            UserError: their sums have begun.
        """
        if self._buckets is not None and self._buckets.have_begun(parameters):
            raise UserError(
                "gradients were cleared behind the last backward pass of a step, within which the workers have begun to sum them: leave a batch out before its "
                "backward(), by what all workers know, as by elastic.mean(loss)"
            )

    def ride(self, name: str, numbers: npt.ArrayLike) -> None:
        """Have a few numbers summed with this step's gradients. All members give the same names and shapes in a step."""
        self._rides.add(name, numbers if self._spread.counts else np.zeros_like(numbers, np.float64))

    def close(
        self,
        *,
        leaving: bool = False,
        stopping: bool = False,
        batch: int = 0,
        state: int = 0,
    ) -> Sums:
        """Sum over the world all that was added.

        ``leaving``, ``stopping``: this worker's votes. ``batch``, ``state``: checksums of the global batch and of the training state.

        Raises:
            UserError: gradients were made otherwise, or the workers train different parameters.
            WorldBroken: gradients are gone, or a newcomer is refused; parameters and buffers are untouched.
        """
        self.weighed.require()
        self._votes[vote.LEAVING], self._votes[vote.STOPPING] = leaving, stopping
        vote.mark(self._votes, batch, state)
        self._frozen.end_step()
        self.passes.end()
        self._sum_all()
        self._buffers.update()
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
        self._sum_all()
        return self._vote()

    # -- details --

    @property
    def _is_alone(self) -> bool:
        """No other process takes part in a step."""
        return self._collective.world.size == 1 and self._inside.size == 1

    def _vote(self) -> Vote:
        if self._inside.size == 1:
            self._count_loss()
        return Vote.of(self._votes)

    def _count_loss(self) -> None:
        """Of a device."""
        if self._loss is not None and (self._has_loss or self._collective.world.size > 1):
            self._votes[vote.LOSS] += (self._read_loss or HostCopy(self._loss)).wait().item()

    def _sum_all(self) -> None:
        if self._collective.world.size > 1:
            self._sum()
        if self._inside.size > 1:
            self._sum_inside()

    def _sum_inside(self) -> None:
        """What each process of this worker has summed with its equals in the others, over these processes."""
        self._count_loss()
        rides = self._rides.numbers()
        one_state = all_equal(self._votes[vote.STATE :], round(self._votes[vote.MEMBERS]))
        *votes, differing = self._inside.sum([*self._votes, *rides, float(not one_state)])
        if rides and self._rides.are_alike:
            self._rides.summed(votes[BALLOT:])
        del votes[BALLOT:]
        # Which mean a worker, and not a process.
        for counted in (vote.ENDED, PASSES, PASSES_SQUARED, *range(RIDES, BALLOT)):
            votes[counted] /= self._inside.size
        # Processes hold different shards: each has compared its own.
        votes[vote.STATE : vote.STATE + SIZE] = [float(differing > 0), *[0.0] * (SIZE - 1)]
        self._votes = votes
        for delta in self._buffers.deltas:
            self._inside.sum_(delta)

    def _count_passes(self) -> None:
        """What is expected of the next step. Where workers differ, they do of nothing."""
        are_alike = self._collective.world.size * self._votes[PASSES_SQUARED] == self._votes[PASSES] ** 2
        made = self._made if are_alike else 0
        self._before, self._expected = made, made if made == self._before else 0

    def _sum(self) -> None:
        if self._agreed != self._collective.world.version:
            self._agree()
            self._agreed, self._overlaps = self._collective.world.version, True
            self._before = 0  # as on a newcomer: all members expect the same
        if self._buckets is None:
            self._small = torch.zeros(BALLOT + ROOM + len(self._trained))
            tail = [*self._deltas, self._small, *([] if self._loss is None else [self._loss])]
            self._buckets = Buckets(self._trained, tail, self._collective)
        buckets, riding = self._buckets, self._rides.numbers()
        self._votes[CHANGED] = self._has_changed()
        self._votes[PASSES], self._votes[PASSES_SQUARED] = self._made, self._made**2
        buckets.begin_early()
        self._votes[LATE] = buckets.take_late()
        if riding:
            self._votes[RIDES:] = summands(self._rides.form())
        room = riding if len(riding) <= ROOM else []
        self._small.numpy()[:] = [*self._votes, *room, *[0.0] * (ROOM - len(room)), *buckets.present()]
        buckets.finish()
        sums = self._small.tolist()
        self._votes, workers = sums[:BALLOT], sums[BALLOT + ROOM :]
        if self._votes[LATE]:
            buckets.sum_late()
            self._overlaps = False  # else each step would take two sums, as with reentrant checkpoints
        for parameter, number in zip(self._trained, workers, strict=True):
            parameter.grad = parameter.grad if number else None
        if self._votes[CHANGED]:
            self._sum_changed()
        if not all_equal(self._votes[RIDES:], self._collective.world.size):
            self._rides.are_alike = False
        elif riding:
            ridden = sums[BALLOT : BALLOT + len(room)]
            if not room:
                self._collective.sum_([beside := torch.tensor(riding)], "elasticdl.rides")
                ridden = beside.tolist()
            self._rides.summed(ridden)

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
        sums = torch.tensor([number for each in checksums for number in summands(each)])
        self._collective.sum_([sums], "elasticdl.trained")
        for at, (line, mine) in enumerate(held.items()):
            if not all_equal(sums.tolist()[at * SIZE :], self._collective.world.size):
                if self._require_one is not None:
                    self._require_one(mine, line)
                raise UserError(line)
        present = self._present()
        if self._has_changed():
            self._trained, self._deltas = present, self._buffers.deltas
            self.drop_buckets()

    def _sum_changed(self) -> None:
        """Some worker trains other parameters than before, or has other buffers: those that are new have not been summed."""
        before, deltas = {id(parameter): parameter for parameter in self._trained}, self._deltas
        self._agree()
        new = [parameter for parameter in self._trained if before.pop(id(parameter), None) is None]
        for parameter in before.values():  # which are frozen now
            parameter.grad = None
        moves = self._deltas if _differ(self._deltas, deltas) else []
        if new or moves:
            Buckets(new, moves, self._collective, launches=False).finish()

    def drop_buckets(self) -> None:
        """The parameters have no hooks of sums any more, and the memory of sums is free."""
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None


def _differ(present: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    return [*map(id, present)] != [*map(id, before)]


def _order(parameter: torch.Tensor) -> list[int]:
    """In which its elements lie, and those of its gradient."""
    here = local(parameter)
    return [stride for size, stride in zip(here.shape, strides_of(here), strict=True) if size > 1]
