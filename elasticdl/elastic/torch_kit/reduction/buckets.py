"""Gradients in flat buckets, each summed over the world while the backward pass makes those of the next.

As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020): buckets are filled in the reverse order of the parameters, and
begun in that order on all workers, also on one that has no gradients. The order is all that workers must have in common: one may
begin its buckets during the backward pass, and another after it.

Small tensors travel at the end of *closing* buckets, which come last and begin in `finish`: until then they may be written.

A gradient that comes after its sum has begun is *late*. Sums are linear, so late gradients are summed by themselves, and added.

Results reach ``parameter.grad`` only once all have arrived, so a torn step changes nothing but gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective, Transfer
from elasticdl.elastic.core.interruptions import WorldBroken
from elasticdl.elastic.torch_kit.flat import aligned, by_kind, flat_views, strides_of
from elasticdl.elastic.torch_kit.reduction.hooks import OwnHook

STEP = "elasticdl.step"  # one name for all steps: a worker that makes one meets another that has ended
BUCKET_BYTES = 4 << 20  # benchmarks/results/HISTORY.md says why


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
    def fill(self, present: dict[int, bool]) -> None:
        """Move the gradients here. A parameter without one counts as having a gradient of zero. ``present``: takes, by its id, whether it has one."""
        gradients, places = list(self._tail), list(self._tail_views)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            gradient, parameter.grad = parameter.grad, None
            present[id(parameter)] = gradient is not None
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
        self._late: dict[int, torch.Tensor] = {}  # gradients, by the numbers of the early parameters
        self._withdrawn: set[int] = set()  # ids of parameters
        own = OwnHook(self._accumulated)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(own)  # type: ignore[no-untyped-call]
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

    def withdraw(self, parameters: Iterable[torch.Tensor]) -> None:
        """What this worker has given to sums that have begun is not to count: the script has cleared these gradients."""
        self._withdrawn.update(id(each) for each in parameters if self._present.get(id(each)))

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
        """After `begin_early`. Returns whether this worker has late gradients, or has withdrawn some."""
        for number, parameter in enumerate(self._early):
            if parameter.grad is not None:
                self._late[number], parameter.grad = parameter.grad, None
        return bool(self._late or self._withdrawn)

    def present(self) -> list[bool]:
        """Of each parameter, whether this worker has given a gradient to its sum, or is about to."""
        return [self._present.get(id(each), each.grad is not None) for each in self._parameters]

    def finish(self, scale: float) -> None:
        """Sum what is not under way yet, wait for all, and hand the sums out, those of gradients times ``scale``.

        Raises:
            WorldBroken: gradients are gone; nothing else has changed.
        """
        while len(self._transfers) < len(self._buckets):
            self._begin_next()
        self._collective.finish(self._transfers)
        self._transfers = []
        for bucket in self._buckets:
            bucket.hand_out(scale)

    @torch.no_grad()
    def sum_late(self, scale: float, workers: Sequence[float]) -> list[float]:
        """Add what has come late, after `finish`, where any member says that it has some. ``workers``: of each parameter, those that have given a gradient
        to its sum. Returns how many have given any.

        Raises:
            WorldBroken: gradients are gone.
            UserError: some members have withdrawn a gradient that others let stand.
        """
        sums = [each.grad for each in self._early]
        every = list(enumerate(self._early))
        marks = torch.tensor(
            [[id(e) in self._withdrawn for _, e in every], [i in self._late for i, _ in every]]
        ).float()
        for number, parameter in every:  # some of which may be frozen by now
            parameter.grad = self._late.get(number)
        Buckets(self._early, [marks], self._collective, launches=False).finish(scale)
        given = dict(zip(map(id, self._parameters), workers, strict=True))
        for parameter, before, withdrawn, late in zip(self._early, sums, *marks.tolist(), strict=True):
            if withdrawn and withdrawn != given[id(parameter)]:
                raise UserError(
                    "some workers have cleared the gradients of their last backward pass, and others have not: let the loop "
                    "clear them by what all workers know, and not by what one has seen of a batch"
                )
            if withdrawn:
                given[id(parameter)] = late
                continue
            given[id(parameter)] += late
            assert before is not None, "sums were handed out"
            parameter.grad = before.add_(parameter.grad) if late else before
        return list(given.values())

    def forget(self) -> bool:
        """A step begins; the last one may be torn. Returns whether a transfer that was left alone may still write here."""
        transfers, self._transfers = self._transfers, []
        self._failure = None
        for noted in (self._present, self._late, self._withdrawn):
            noted.clear()
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
        size += aligned(parameter) * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run
