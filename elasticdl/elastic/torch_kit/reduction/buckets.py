"""Gradients in flat buckets, each summed over the world while the backward pass makes those of the next.

As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020): buckets are filled in the reverse order of the parameters, and
launched in that order on all workers, also on one that has no gradients. Results reach ``parameter.grad`` only once all have
arrived, so a torn step changes nothing but gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective, Transfer
from elasticdl.elastic.torch_kit.flat import aligned, by_kind, flat_views, strides_of
from elasticdl.elastic.torch_kit.reduction.hooks import OwnHook

STEP = "elasticdl.step"  # one name for all steps: a worker that makes one meets another that has ended
BUCKET_BYTES = 4 << 20  # docs/benchmarks.md says why


class _Bucket:
    """Gradients of one kind as flat memory. ``tail``: further tensors of that kind, which travel at its end."""

    def __init__(self, parameters: list[torch.nn.Parameter], tail: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self._tail = tail
        self.flat, views = flat_views([*parameters, *tail])
        self._tail_views = views[len(parameters) :]
        # As backward passes make them: a fused optimizer takes parameter and gradient for arrays in one order.
        self._views = [
            view.as_strided(each.shape, strides_of(each)) for view, each in zip(views, parameters, strict=False)
        ]

    @torch.no_grad()
    def fill(self) -> None:
        """Move the gradients here. A parameter without one counts as having a gradient of zero."""
        gradients, places = list(self._tail), list(self._tail_views)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                view.zero_()
            else:
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
                places.append(view)
        if places:
            torch._foreach_copy_(places, gradients)

    @torch.no_grad()
    def hand_out(self, scale: float) -> None:
        """Make the sums the gradients."""
        if self._tail:
            torch._foreach_copy_(self._tail, self._tail_views)
        if scale != 1.0:
            self.flat.mul_(scale)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view


class Buckets:
    """The gradients of some parameters, and small tensors beside them, on their way through the world."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], tail: Sequence[torch.Tensor], collective: Collective
    ) -> None:
        """``tail``: tensors that are summed in place; complete before the last backward pass of a step."""
        self._collective = collective
        rest, self._buckets = by_kind(tail), []
        for kind, of_kind in by_kind(reversed(parameters)).items():
            *others, last = _cut(of_kind)
            self._buckets += [_Bucket(run, []) for run in others]
            self._buckets.append(_Bucket(last, rest.pop(kind, [])))
        # What is complete already goes first.
        self._buckets = [_Bucket([], of_kind) for of_kind in rest.values()] + self._buckets
        self._number = {id(each): i for i, bucket in enumerate(self._buckets) for each in bucket.parameters}
        self._missing: list[set[int]] = []  # of each bucket, the parameters whose gradients are not there yet
        self._transfers: list[Transfer] = []
        several = sum(bool(bucket.parameters) for bucket in self._buckets) > 1
        own = OwnHook(self._accumulated)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(own)  # type: ignore[no-untyped-call]
            for parameter in (parameters if several else ())
        ]

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Within, the backward pass makes the last gradients of this step."""
        self._missing = [{id(parameter) for parameter in bucket.parameters} for bucket in self._buckets]
        try:
            self._launch_complete()
            yield
        finally:
            self._missing = []

    def finish(self, scale: float) -> None:
        """Sum what is not under way yet, wait for all, and hand the sums out, those of gradients times ``scale``.

        Raises:
            WorldBroken: gradients are gone; nothing else has changed.
        """
        for bucket in self._buckets[len(self._transfers) :]:
            self._launch(bucket)
        self._collective.finish(self._transfers)
        self._transfers = []
        for bucket in self._buckets:
            bucket.hand_out(scale)

    def forget(self) -> bool:
        """The step is torn. Returns whether a transfer that was left alone may still write here."""
        transfers, self._transfers = self._transfers, []
        return any(map(self._collective.in_flight, transfers))

    def close(self) -> None:
        """The parameters are as if they had never been here."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._missing:
            return
        number = self._number[id(parameter)]
        if number < len(self._transfers):
            raise UserError(
                "a parameter got a gradient again after its sum had begun, as with reentrant checkpointing: give "
                "checkpoint(..., use_reentrant=False), or batch.weigh(loss).backward() instead of batch.backward(loss)"
            )
        self._missing[number].discard(id(parameter))
        self._launch_complete()

    def _launch_complete(self) -> None:
        while (number := len(self._transfers)) < len(self._buckets) and not self._missing[number]:
            self._launch(self._buckets[number])

    def _launch(self, bucket: _Bucket) -> None:
        bucket.fill()
        self._transfers.append(self._collective.begin_sum(bucket.flat, f"{STEP}.{len(self._transfers)}"))


def _cut(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Into runs of about `BUCKET_BYTES`."""
    run: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        run.append(parameter)
        size += aligned(parameter) * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run
