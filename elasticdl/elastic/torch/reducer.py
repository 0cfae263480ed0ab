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


def _counts(buffer: torch.Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)


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
        buffers = list(buffers)
        self._statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._counters = [buffer for buffer in buffers if _counts(buffer)]
        self._before = [buffer.clone() for buffer in self._tracked]
        self._counted = False  # whether a micro-batch of this step has been added to the sums
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._vote = torch.zeros(VOTE_SIZE, dtype=torch.float32, device=device)
        counts = [torch.zeros(counter.shape, dtype=torch.float32, device=counter.device) for counter in self._counters]
        self._flats, views = self._layout([*self._parameters, *self._statistics, *counts, self._vote])
        count = len(self._parameters)
        self._gradients, self._deltas = views[:count], views[count:-1]
        self._vote = views[-1]

    @staticmethod
    def _layout(sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Zeroed flat tensors, one for each kind, and for each given tensor a view into one of them of its shape."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(sources):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        flats: list[torch.Tensor] = []
        views: list[torch.Tensor] = [torch.empty(0)] * len(sources)
        for (dtype, device), indices in kinds.items():
            sizes = [-(-sources[index].numel() // ALIGNMENT) * ALIGNMENT for index in indices]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            flats.append(flat)
            for index, start in zip(indices, accumulate(sizes, initial=0), strict=False):
                views[index] = flat[start : start + sources[index].numel()].view(sources[index].shape)
        return flats, views

    @property
    def _tracked(self) -> list[torch.Tensor]:
        return [*self._statistics, *self._counters]

    def knows(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these are reduced, as far as they require a gradient."""
        return all(id(parameter) in self._known for parameter in parameters if parameter.requires_grad)

    def begin(self) -> None:
        """Set all gradients to zero, and make backward passes accumulate where they will be reduced."""
        for flat in self._flats:
            flat.zero_()
        self._counted = False
        for before, buffer in zip(self._before, self._tracked, strict=True):
            before.copy_(buffer)
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
        weights = [weight] * len(self._statistics) + [float(is_first)] * len(self._counters)
        for buffer, before, delta, part in zip(self._tracked, self._before, self._deltas, weights, strict=True):
            # What stays as it is may be infinite, as in a mask.
            delta.add_(torch.where(buffer == before, 0, buffer - before), alpha=part)

    def reset_buffers(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        for buffer, before in zip(self._tracked, self._before, strict=True):
            buffer.data.copy_(before)  # a backward pass that is yet to come has noted the buffer's version

    def reduce(self, *, leaving: bool, share: float, scale: float, stopping: bool = False) -> Vote:
        """Sum the gradients over the world; afterwards ``parameter.grad`` holds the result.

        ``share``: the part of the global batch that was this worker's, by which its running statistics count if no
        micro-batch was added. ``scale``: factor on the sum; 1 if the loss was weighed by sample counts already.

        Raises:
            WorldBroken: gradients are undefined, parameters untouched.
        """
        self._gather()
        if not self._counted:
            self._add_own_statistics(share)
        self._vote[LEAVING] = float(leaving)
        self._vote[STOPPING] = float(stopping)
        self._vote[ENDED] = 0.0
        self._collective.sum_(self._flats, STEP)
        self._update_buffers()
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

    def _add_own_statistics(self, share: float) -> None:
        """For a loop whose batches are its own."""
        for statistic, delta in zip(self._statistics, self._deltas, strict=False):
            torch.mul(statistic, share, out=delta)

    @torch.no_grad()
    def _update_buffers(self) -> None:
        if not self._counted:
            for statistic, delta in zip(self._statistics, self._deltas, strict=False):
                statistic.copy_(delta)
            return
        for buffer, before, delta in zip(self._tracked, self._before, self._deltas, strict=True):
            buffer.copy_(before + delta.to(before.dtype))

    def _gather(self) -> None:
        """Bring gradients that live elsewhere (after ``zero_grad(set_to_none=True)``) into the flat buffer."""
        for parameter, view in zip(self._parameters, self._gradients, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
            parameter.grad = view
