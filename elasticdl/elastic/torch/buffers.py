"""What a forward pass does to a model's buffers must not depend on how many micro-batches a worker runs one after the other.

So each micro-batch begins with the buffers of before the step, and what it moves them by is summed like the gradients:
statistics (floating point, as of batch norm) by the mean over all micro-batches, weighed by samples; counters (integers) by
what the step's very first micro-batch moves them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elasticdl.elastic.torch.flat import by_kind, flat_views


class _BufferGroup:
    """Buffers of one kind. They are copied to flat memory and back at once: a model has hundreds of small ones."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self.counts = not buffers[0].is_floating_point()
        self.before, self._before = flat_views(buffers)
        self._now, self._views = flat_views(buffers)
        self.delta = torch.zeros_like(self.before, dtype=torch.float32 if self.counts else None)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        torch._foreach_copy_(self._before, self._buffers)
        self.delta.zero_()

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


class Buffers:
    """The buffers of a model in the course of a step."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        kinds = by_kind(each for each in buffers if _can_be_moved(each))
        self._groups = [_BufferGroup(each) for each in kinds.values()]
        self._counted = False  # whether a micro-batch of this step has been added to the sums
        self._alone = False  # that micro-batch is the whole step

    @property
    def deltas(self) -> list[torch.Tensor]:
        """To be summed over the world between `close` and `update`."""
        return [group.delta for group in self._groups]

    def begin(self) -> None:
        self._counted = self._alone = False
        for group in self._groups:
            group.begin()

    @torch.no_grad()
    def add(self, weight: float, *, is_first: bool, alone: bool) -> None:
        """Count what a micro-batch's forward pass has done; its backward pass may be yet to come.

        ``weight``: its part of the global batch. ``is_first``: it is the very first of the step. ``alone``: there is no
        other worker.
        """
        self._counted = True
        self._alone = alone and weight == 1.0  # the buffers are what they should be
        for group in () if self._alone else self._groups:
            group.add_delta(float(is_first) if group.counts else weight)

    def reset(self) -> None:
        """Have the next micro-batch begin with the buffers of before the step."""
        for group in self._groups:
            group.reset()

    def close(self, share: float) -> None:
        """All of this worker's micro-batches have been added. If there was none, the statistics count by ``share``."""
        for group in () if self._counted else self._groups:
            group.take_share(share)

    def update(self) -> None:
        """The deltas have been summed."""
        for group in () if self._alone else self._groups:
            group.update(counted=self._counted)


def _can_be_moved(buffer: torch.Tensor) -> bool:
    """Whether PyTorch adds and subtracts such numbers; the others, as quantized weights, stay each worker's own."""
    if buffer.is_floating_point():
        return buffer.itemsize > 1
    return not buffer.is_complex() and buffer.dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)
