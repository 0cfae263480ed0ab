"""Reducing the gradients of a step, and the vote that rides on them, in as few collectives as possible.

All gradients of one dtype and device live in one flat buffer, as views; the same buffer has room for the floating-point
buffers of the model (running statistics of batch norm) and for the vote. One collective per step then carries
everything: with one small tensor after the other, most of Horovod's time is negotiation.

What a forward pass does to the buffers must not depend on how many micro-batches a worker happens to run one after the
other. So each micro-batch begins with the buffers of before the step, and what it moves them by is summed like the
gradients: statistics (floating point) by the mean over all micro-batches, weighed by samples; counters (integers) by what
the step's very first micro-batch moves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from elasticdl.elastic.core.vote import ENDED, LEAVING, LOSS, SAMPLES, STOPPING, VOTE_SIZE, Vote
from elasticdl.elastic.torch.collective import TorchCollective

STEP = "elasticdl.step"  # one name for all steps: a worker that makes one meets another that has ended
# Views start at multiples of this many elements, so that vectorised kernels meet aligned memory.
ALIGNMENT = 16


def _moves(buffer: torch.Tensor) -> bool:
    return not (buffer.is_complex() or buffer.dtype == torch.bool)


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds


def _lay_out(sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zeroed flat tensors, one for each kind, and for each given tensor a view into one of them of its shape."""
    flats, views = [], {}
    for (dtype, device), tensors in _by_kind(sources).items():
        sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        flats.append(flat)
        for tensor, start in zip(tensors, accumulate(sizes, initial=0), strict=False):
            views[id(tensor)] = flat[start : start + tensor.numel()].view(tensor.shape)
    return flats, [views[id(tensor)] for tensor in sources]


class _BufferGroup:
    """Buffers of one kind. They are copied to flat memory and back at once: a model has hundreds of small ones."""

    delta: torch.Tensor  # flat, a part of what is summed

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self.counts = not buffers[0].is_floating_point()
        self.delta_dtype = torch.float32 if self.counts else buffers[0].dtype
        (self.before,), self._before = _lay_out(buffers)
        (self._now,), self._views = _lay_out(buffers)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        torch._foreach_copy_(self._before, self._buffers)

    def add_delta(self, part: float) -> None:
        if part:
            torch._foreach_copy_(self._views, self._buffers)
            # What stays as it is may be infinite, as in a mask.
            self.delta.add_(torch.where(self._now == self.before, 0, self._now - self.before), alpha=part)

    def reset(self) -> None:
        # A backward pass that is yet to come has noted the buffers' versions.
        torch._foreach_copy_([buffer.data for buffer in self._buffers], self._before)

    @torch.no_grad()
    def take_share(self, share: float) -> None:
        """For a loop whose batches are its own."""
        if not self.counts:
            torch._foreach_copy_(self._views, self._buffers)
            torch.mul(self._now, share, out=self.delta)

    @torch.no_grad()
    def update(self, *, counted: bool) -> None:
        if counted:
            torch.add(self.before, self.delta.to(self.before.dtype), out=self._now)
        elif not self.counts:
            self._now.copy_(self.delta)
        else:
            return
        torch._foreach_copy_(self._buffers, self._views)


class GradientReducer:
    """Owns the gradients of some parameters between two optimizer steps.

    Parameters that get no gradient in a step count as having a gradient of zero.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], buffers: Iterable[torch.Tensor], collective: TorchCollective
    ) -> None:
        self._collective = collective
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._known = {id(parameter) for parameter in self._parameters}
        self._buffers = [_BufferGroup(each) for each in _by_kind(filter(_moves, buffers)).values()]
        self._counted = False  # whether a micro-batch of this step has been added to the sums
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        deltas = [torch.empty_like(group.before, dtype=group.delta_dtype) for group in self._buffers]
        vote = torch.empty(VOTE_SIZE, dtype=torch.float32, device=device)
        self._flats, views = _lay_out([*self._parameters, *deltas, vote])
        self._gradients, self._vote = views[: len(self._parameters)], views[-1]
        for group, delta in zip(self._buffers, views[len(self._parameters) : -1], strict=True):
            group.delta = delta

    def knows(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these are reduced, as far as they require a gradient."""
        return all(id(parameter) in self._known for parameter in parameters if parameter.requires_grad)

    def begin(self) -> None:
        """Set all gradients to zero, and make backward passes accumulate where they will be reduced."""
        for flat in self._flats:
            flat.zero_()
        self._counted = False
        for group in self._buffers:
            group.begin()
        for parameter, view in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = view

    def add_loss(self, loss: torch.Tensor, samples: int) -> None:
        """Count a micro-batch of this many samples with this mean loss."""
        self._vote[SAMPLES] += samples
        self._vote[LOSS] += loss.detach().to(self._vote.dtype) * samples

    @torch.no_grad()
    def add_deltas(self, weight: float, *, is_first: bool) -> None:
        """Count what a micro-batch's forward pass has done to the buffers; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step.
        """
        self._counted = True
        for group in self._buffers:
            group.add_delta(float(is_first) if group.counts else weight)

    def reset_buffers(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        for group in self._buffers:
            group.reset()

    def reduce(self, *, leaving: bool, share: float, scale: float, stopping: bool = False) -> Vote:
        """Sum the gradients over the world; afterwards ``parameter.grad`` holds the result.

        ``share``: the part of the global batch that was this worker's, by which its running statistics count if no
        micro-batch was added. ``scale``: factor on the sum; 1 if the loss was weighed by sample counts already.

        Raises:
            WorldBroken: gradients are undefined, parameters untouched.
        """
        self._gather()
        for group in () if self._counted else self._buffers:
            group.take_share(share)
        self._vote[LEAVING] = float(leaving)
        self._vote[STOPPING] = float(stopping)
        self._vote[ENDED] = 0.0
        self._collective.sum_(self._flats, STEP)
        for group in self._buffers:
            group.update(counted=self._counted)
        vote = Vote.of(self._vote.tolist())
        if scale != 1.0:
            for view in self._gradients:
                view.mul_(scale)
        return vote

    def end(self) -> Vote:
        """Take part in a step without anything to add: this worker's training is over.

        Raises:
            WorldBroken: a member was lost.
        """
        for flat in self._flats:
            flat.zero_()
        self._vote[ENDED] = 1.0
        self._collective.sum_(self._flats, STEP)
        return Vote.of(self._vote.tolist())

    def _gather(self) -> None:
        """Bring gradients that live elsewhere (after ``zero_grad(set_to_none=True)``) into the flat buffer."""
        for parameter, view in zip(self._parameters, self._gradients, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
            parameter.grad = view
