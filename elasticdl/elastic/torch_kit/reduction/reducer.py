"""The gradients of a step, what its forward passes did to the model's buffers, and the vote that goes with them."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.vote import (
    ENDED,
    LEAVING,
    LOSS,
    SAMPLES,
    SQUARES,
    STOPPING,
    VOTE_SIZE,
    GradientNoise,
    Vote,
    mark,
)
from elasticdl.elastic.torch_kit.flat import strides_of
from elasticdl.elastic.torch_kit.gpu import HostCopy, PassTimer
from elasticdl.elastic.torch_kit.reduction.buckets import Buckets
from elasticdl.elastic.torch_kit.reduction.buffers import Buffers
from elasticdl.elastic.torch_kit.reduction.hooks import ParameterHooks
from elasticdl.elastic.torch_kit.reduction.named import Followers, NamedBuffers

CHANGED = VOTE_SIZE  # a further place in the vector of votes: this worker trains other parameters than in the last step


class GradientReducer:
    """Owns the gradients of some parameters between two optimizer steps.

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
    ) -> None:
        """``parameters``: all that the optimizer has at present. ``modules``: whose buffers are summed. ``keeps_absent``: a parameter that no worker has a gradient
        of ends with none, as on one device, instead of with zeros. ``may_be_summed``: there may be other workers. ``hooks_rest``: see `ParameterHooks`."""
        self.hooks = ParameterHooks(parameters, rest=hooks_rest)
        self._all = parameters
        self._collective = collective
        self._buffers = Buffers(modules, may_be_summed=may_be_summed)
        device = next((each.device for each in parameters()), torch.device("cpu"))
        self.passes = PassTimer(device)
        self._votes = [0.0] * (VOTE_SIZE + 1)  # this worker's, and after the reduction those of all
        self._vote = torch.zeros(VOTE_SIZE + 1)
        self._is_filled = False  # with this step's
        # A loss on a GPU stays there, so that nobody waits for it before the step's end.
        self._loss = None if device.type == "cpu" else torch.zeros(1, device=device)
        self._read_loss: HostCopy | None = None  # of this step
        self._present_anywhere = (
            torch.zeros(0) if leaves_missing_grads_none else None
        )  # of each trained parameter, workers with a gradient
        self._trained: list[torch.nn.Parameter] = []
        self._deltas: list[torch.Tensor] = []  # of buffers, as they were when it was agreed on them
        self._batch = 0  # samples of this step, if the noise of its gradients is measured
        self._agreed = -1  # version of the world whose members have found that they train the same parameters
        self._buckets: Buckets | None = None

    @property
    def followers(self) -> Followers:
        return self._buffers.followers

    @property
    def buffers(self) -> NamedBuffers:
        """Of the modules, those that there are."""
        return self._buffers.found

    def begin(self) -> None:
        """A step begins: there are no gradients."""
        self.begin_counting()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self._all():
            parameter.grad = None

    def begin_counting(self) -> None:
        """A step begins; its gradients are yet to be cleared."""
        self.hooks.put_back()
        if self._buckets is not None and self._buckets.forget():
            self._drop_buckets()
        self._votes = [0.0] * len(self._votes)
        self._is_filled = False
        if self._loss is not None:
            self._loss.zero_()
        self._read_loss = None
        self._batch = 0
        self._buffers.begin()
        self.passes.begin()

    def add(self, loss: torch.Tensor, samples: int, *, weight: float, is_first: bool, passes: int = 1) -> None:
        """Count a micro-batch of this many samples with this mean loss; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step. ``passes``: that it was in fact.

        Raises:
            UserError: a buffer has come, gone or changed its shape.
        """
        self._votes[SAMPLES] += samples
        if self._loss is None:
            self._votes[LOSS] += loss.item() * samples
        else:
            self._loss += loss.detach().to(self._loss) * samples
        alone = self._collective.world.size == 1
        self._buffers.add(weight, is_first=is_first, alone=alone, samples=samples, passes=passes)

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

    def cast_vote(
        self, *, leaving: bool, share: float | None = None, stopping: bool = False, batch: int = 0, state: int = 0
    ) -> None:
        """This worker's micro-batches have been added, though the last backward pass may be yet to come.

        ``share``: of this worker in a step whose batches are its own, by which its running statistics count; None in any other.
        ``batch``, ``state``: checksums of the global batch and of the training state.
        """
        self._votes[LEAVING], self._votes[STOPPING] = leaving, stopping
        mark(self._votes, batch, state)
        self._buffers.close(share)
        if self._loss is not None and self._collective.world.size == 1:
            # It comes to the host while the device is on the backward pass, which is not waited for.
            self._read_loss = HostCopy(self._loss)

    def measure_noise(self, batch: int) -> None:
        """All members do so in this step, which has so many samples, weighed by their counts. Their own gradients have to be
        there at its end, so it does without `launching`."""
        self._batch = batch if self._collective.world.size > 1 else 0

    def launching(self) -> AbstractContextManager[None]:
        """Within, the backward pass makes the last gradients of this step: they are reduced meanwhile, after `cast`."""
        if self._buckets is None or self._agreed != self._collective.world.version or self._batch:
            return contextlib.nullcontext()
        self._fill_vote()
        return self._buckets.launching()

    def reduce(self, scale: float = 1.0) -> Vote:
        """Sum over the world; afterwards ``parameter.grad`` holds the result.

        ``scale``: factor on the sum; 1 if the loss was weighed by sample counts already.

        Raises:
            UserError: the workers train different parameters.
            WorldBroken: gradients are gone; parameters and buffers are untouched.
        """
        self.passes.end()
        if self._collective.world.size == 1:
            self._complete_alone(scale)
        else:
            self._sum(scale)
        self._buffers.update(round(self._votes[SAMPLES]))
        return self._result()

    def end(self, state: int = 0) -> Vote:
        """Take part in a step without anything to add: this worker's training is over. ``state``: as for `cast`.

        Raises:
            WorldBroken: a member was lost.
        """
        self.begin()
        self._votes[ENDED] = 1.0
        mark(self._votes, 0, state)
        if self._collective.world.size > 1:
            self._sum(1.0)
        return self._result()

    def _result(self) -> Vote:
        if self._loss is not None:
            self._votes[LOSS] = (self._read_loss or HostCopy(self._loss)).wait().item()
        if not self._batch or self._batch != round(self._votes[SAMPLES]):  # of others nothing was measured
            return Vote.of(self._votes)
        squares, reduced = self._votes[SQUARES] * self._batch**2, _square(self._trained)
        return Vote.of(self._votes, GradientNoise.of(squares, reduced, self._batch, self._collective.world.size))

    def _fill_vote(self) -> None:
        self._is_filled = True
        self._votes[CHANGED] = self._has_changed()
        self._vote.copy_(torch.tensor(self._votes))
        if self._present_anywhere is not None:
            self._present_anywhere.copy_(torch.tensor([float(each.grad is not None) for each in self._trained]))

    def _complete_alone(self, scale: float) -> None:
        for parameter in self._present():
            if parameter.grad is None:
                parameter.grad = None if self._present_anywhere is not None else torch.zeros_like(parameter)
                continue
            if parameter.grad.is_sparse and self._buckets is not None:  # as it was in the larger world
                parameter.grad = parameter.grad.to_dense()
            if scale != 1.0:
                parameter.grad.mul_(scale)

    def _sum(self, scale: float) -> None:
        if self._agreed != self._collective.world.version:
            self._agree()
            self._agreed = self._collective.world.version
        if self._buckets is None:
            tail = [*self._deltas, self._vote, *([] if self._loss is None else [self._loss])]
            if self._present_anywhere is not None:
                self._present_anywhere = torch.zeros(len(self._trained))
                tail.append(self._present_anywhere)
            self._buckets = Buckets(self._trained, tail, self._collective)
        if self._batch and self._votes[SAMPLES]:  # its gradients are b_i / B times the mean over its samples
            self._votes[SQUARES] = _square(self._trained) / self._votes[SAMPLES]
        if not self._is_filled:
            self._fill_vote()
        self._buckets.finish(scale)
        self._votes = self._vote.tolist()
        if self._present_anywhere is not None:
            for parameter, workers in zip(self._trained, self._present_anywhere.tolist(), strict=True):
                parameter.grad = parameter.grad if workers else None
        if self._votes[CHANGED]:
            self._sum_changed(scale)
            self._batch = 0  # the squares were those of other gradients

    # -- which parameters are trained --

    def _present(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._all() if parameter.requires_grad]

    def _has_changed(self) -> bool:
        return self._has_other(self._present(), self._trained) or self._has_other(self._buffers.deltas, self._deltas)

    @staticmethod
    def _has_other(present: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
        return [*map(id, present)] != [*map(id, before)]

    def _agree(self) -> None:
        """From now on the present parameters are reduced."""
        parameters = list(self._all())
        trained = [(i, each.shape, _order(each), each.dtype) for i, each in enumerate(parameters) if each.requires_grad]
        buffers = [(each.shape, each.dtype) for each in self._buffers.deltas]
        mine = torch.tensor([*_four_bytes(trained), *_four_bytes(buffers)], dtype=torch.float32)
        total = mine.clone()
        self._collective.sum_([total], "elasticdl.trained")
        differ = total != mine * self._collective.world.size
        if differ[:4].any():
            raise UserError(
                f"the workers train different parameters, of which this one has {len(trained)}: freeze, unfreeze and add them "
                "alike on all, by the epoch or the step, and not by what one worker has seen of a batch"
            )
        if differ.any():
            raise UserError(
                "the models of the workers have different buffers: register them when the model is made, with shapes that do not "
                "depend on what a worker has computed"
            )
        present = self._present()
        for each in present:
            if each.is_floating_point() and each.itemsize == 1:
                raise UserError(
                    f"a parameter of shape {tuple(each.shape)} is trained in {str(each.dtype).removeprefix('torch.')}, whose gradients can't be "
                    "summed: keep it in bfloat16 or float32, and convert it where it is used"
                )
        if self._has_changed():
            self._trained, self._deltas = present, self._buffers.deltas
            self._drop_buckets()

    def _sum_changed(self, scale: float) -> None:
        """Some worker trains other parameters than before, or has other buffers: those that are new have not been summed."""
        before, deltas = {id(parameter): parameter for parameter in self._trained}, self._deltas
        self._agree()
        new = [parameter for parameter in self._trained if before.pop(id(parameter), None) is None]
        for parameter in before.values():  # which are frozen now
            parameter.grad = None
        moves = self._deltas if self._has_other(self._deltas, deltas) else []
        if new or moves:
            extra = Buckets(new, moves, self._collective)
            try:
                extra.finish(scale)
            finally:
                extra.close()

    def _drop_buckets(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None


def _four_bytes(value: object) -> bytes:
    return zlib.crc32(repr(value).encode()).to_bytes(4, "big")


def _order(parameter: torch.Tensor) -> list[int]:
    """In which its elements lie, and those of its gradient."""
    return [stride for size, stride in zip(parameter.shape, strides_of(parameter), strict=True) if size > 1]


def _square(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Of the gradients of all of these, as one vector."""
    gradients = [each.grad for each in parameters if each.grad is not None and not each.grad.is_sparse]
    if not gradients:
        return 0.0
    with torch.no_grad():
        norms = [norm.float() for norm in torch._foreach_norm(gradients)]
        return float(torch.stack(norms).square().sum())
