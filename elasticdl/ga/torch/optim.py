"""Torch's optimizers, made to accumulate gradients.

    optimizer = optim.Optimizer(torch.optim.Adam(model.parameters()), steps=STEPS)
    optimizer = optim.Adam(STEPS, model.parameters())

The ready-made ones, one for each of torch's, take ``steps`` first or by name, then what torch's class of that name takes. Optimizers
that evaluate a closure several times in one step (LBFGS) cannot be fed one micro-batch after the other and are refused.

`Optimizer` wraps one, and makes one step of several micro-batches.

    micro-batch   1 .. steps-1     step() moves its gradient out of ``p.grad`` into the sum; ``p.grad`` is None
    micro-batch   steps            step() puts the weighted mean into ``p.grad``, and the wrapped optimizer makes its step;
                                   then ``p.grad`` is None, and the next accumulation begins

So ``zero_grad()`` clears what has not been handed to ``step()`` yet, as always in torch, and nothing else.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.ga.steps import ReadyMade, check_samples, checked_steps, ready_made

STATE_KEY = "accumulation"

P = ParamSpec("P")
R = TypeVar("R")


# The gradients of the micro-batches seen so far: their weighted sum, kept apart from ``parameter.grad``.
#
# Apart, because then whatever a training loop does to ``parameter.grad`` between two micro-batches (``zero_grad``, a
# `GradScaler`) concerns the one micro-batch that it means, and never those before.


@dataclass(slots=True)
class Accumulation:
    """What has been taken in since the last optimizer step.

    A parameter that got no gradient in some of the micro-batches counts as having got zero there; one that got none in
    any has no sum, and the optimizer will leave it alone, as it would after one big batch.
    """

    count: int = 0  # micro-batches
    weight: float = 0.0  # of all of them
    by_samples: bool = False  # weights are sample counts; otherwise each is 1
    sums: dict[Tensor, Tensor] = field(default_factory=dict)
    overflow: Tensor | None = None  # more than zero: a GradScaler found a gradient that is not finite

    @torch.no_grad()
    def take(self, params: Iterable[Tensor], samples: float | None, scale: Tensor | None) -> bool:
        """Move the gradients of one micro-batch in here; False if there are none, which then changes nothing.

        ``scale``: what the gradients were multiplied with; taken out, so that it may differ between micro-batches.
        """
        having = [(param, param.grad) for param in params if param.grad is not None]
        if not having:
            return False
        self._check_weight(samples)
        weight = 1.0 if samples is None else float(samples)
        for param, grad in having:
            param.grad = None
            self._add(param, grad.detach(), weight, scale)
        self.weight += weight
        self.count += 1
        return True

    def _check_weight(self, samples: float | None) -> None:
        if self.count and self.by_samples != (samples is not None):
            raise UserError("give the number of samples to every micro-batch of an accumulation, or to none")
        self.by_samples = samples is not None

    def _add(self, param: Tensor, grad: Tensor, weight: float, scale: Tensor | None) -> None:
        # Half precision would lose what is small beside the sum; one big batch sums in single precision, too.
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if scale is not None:
            grad = grad / scale.to(grad.device)
        if param in self.sums:
            self.sums[param].add_(grad, alpha=weight)
        else:
            self.sums[param] = grad * weight  # a copy: the memory of a gradient may be shared with others

    def note_overflow(self, found: Any) -> None:
        """Remember what a GradScaler found in a micro-batch, without waiting for the device."""
        if isinstance(found, Tensor):
            self.overflow = found.clone() if self.overflow is None else self.overflow + found.to(self.overflow.device)

    @property
    def overflowed(self) -> bool:
        return self.overflow is not None and bool(self.overflow)

    @torch.no_grad()
    def put_mean(self, params: Iterable[Tensor]) -> None:
        """Move the mean into the ``grad`` of the parameters; what they held is replaced."""
        for param in params:
            total = self.sums.pop(param, None)
            param.grad = None if total is None else total.div_(self.weight).to(param.dtype)

    def state(self, params: Iterable[Tensor]) -> dict[str, Any]:
        """Plain values and tensors, the latter by the index of their parameter, as in torch's optimizer states."""
        return {
            "count": self.count,
            "weight": self.weight,
            "by_samples": self.by_samples,
            "sums": {index: self.sums[param] for index, param in enumerate(params) if param in self.sums},
            "overflowed": self.overflowed,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], params: Iterable[Tensor]) -> Accumulation:
        """The inverse of `state`; sums are copied to where their parameters are."""
        sums = state["sums"]
        return cls(
            count=state["count"],
            weight=state["weight"],
            by_samples=state["by_samples"],
            sums={
                param: sums[index].detach().to(param.device, copy=True)
                for index, param in enumerate(params)
                if index in sums
            },
            overflow=torch.ones(()) if state["overflowed"] else None,
        )


def _runs_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Under `torch.compile`, too: counting in Python would be traced anew for each count."""
    return cast(Callable[P, R], torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Optimizer(torch.optim.Optimizer):
    """``optimizer``, stepping once for every ``steps`` micro-batches, on the mean of their gradients.

    Parameter groups, state, defaults, hooks and whatever else is not mentioned here are those of the wrapped optimizer,
    ``self.optimizer``: hooks run once per optimizer step, with ``p.grad`` holding the mean.
    """

    # So a GradScaler hands over every micro-batch, with what it found, instead of not calling step() after an overflow.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Wrap one of torch's optimizers.

        Args:
            optimizer: steps on the mean gradients; it must not evaluate a closure several times, as LBFGS does.
            steps: micro-batches per optimizer step, at least 1.

        Raises:
            ArgumentError: ``steps`` or the optimizer cannot be right.
        """
        # No super().__init__(): groups, state and hooks exist once, in the wrapped optimizer.
        self.optimizer = _checked_optimizer(optimizer)
        self.steps = steps
        self._begin()
        # Whether the last ``step()`` or ``flush()`` made an optimizer step; False if a GradScaler had it left out.
        self.stepped = False

    @property
    def steps(self) -> int:
        """Micro-batches per optimizer step. May be changed at any time; what is accumulated stays."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = checked_steps(steps)

    @property
    def will_step(self) -> bool:
        """Whether the next micro-batch completes the accumulation: the next ``step()`` changes the parameters."""
        return self._accumulation.count + 1 >= self.steps

    @_runs_eagerly
    def step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None) -> Any:
        """Hand over the gradient of one micro-batch; each ``steps``-th call makes an optimizer step.

        Args:
            closure: computes loss and gradient of this micro-batch; called once.
            samples: what the mean loss of the micro-batch was divided by, if not the same for all of them.

        Returns:
            The closure's loss, or None.

        Raises:
            ArgumentError: ``samples`` is no number above 0.
        """
        self.stepped = False
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._take(samples) and self._accumulation.count >= self.steps:
            self._update()
        return loss

    @_runs_eagerly
    def flush(self) -> bool:
        """Make the optimizer step of what is accumulated, if anything: at the end of an epoch. True if one was made."""
        self.stepped = False
        self._take(None)
        if self._accumulation.count:
            self._update()
        return self.stepped

    def discard(self) -> None:
        """Forget what is accumulated, ``p.grad`` included, and begin anew."""
        self.optimizer.zero_grad()
        self._begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad``: of the micro-batch that was not handed over yet. What is accumulated stays."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer, and what is accumulated, if anything; either can load the other's.

        ``steps`` is not in it: it stays what the constructor was given.
        """
        state = self.optimizer.state_dict()
        if self._accumulation.count:
            state[STATE_KEY] = self._accumulation.state(self._params())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, in the middle of an accumulation if it was saved there.

        Raises:
            ArgumentError: it is no state of an optimizer; nothing has been loaded.
            ValueError: torch's own, where it is one of other parameters.
        """
        accumulation = Accumulation()
        try:
            if STATE_KEY in state_dict:
                accumulation = Accumulation.from_state(state_dict[STATE_KEY], self._params())
            self.optimizer.load_state_dict(state_dict)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"load_state_dict(): a {type(state_dict).__name__} that is no state of an optimizer ("
                f"{type(error).__name__}: {error}); give what state_dict() returned"
            ) from error
        self.discard()
        self._accumulation = accumulation

    def __getattr__(self, name: str) -> Any:
        # The hooks that the methods inherited from torch register, and what the wrapped optimizer has of its own.
        if name.startswith("__") or name == "optimizer":  # the latter: while being unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # What a scheduler has put into this object is no part of it.
        return {name: self.__dict__[name] for name in ("optimizer", "_steps", "_accumulation", "_rates", "stepped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__} (steps={self.steps}) of {self.optimizer!r}"

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def _begin(self) -> None:
        self._accumulation = Accumulation()
        self._rates: list[float] = []

    def _take(self, samples: float | None) -> bool:
        """Take what is in ``p.grad``; False if there is nothing."""
        check_samples(samples)
        # A GradScaler sets these two for the time of its call: the scale, or None after unscale_(); what it found.
        scale, found = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        taken = self._accumulation.take(self._params(), samples, scale)
        self._accumulation.note_overflow(found)
        if taken:
            self._check_rates()
        return taken

    def _update(self) -> None:
        """Make the optimizer step of what is accumulated, and begin anew."""
        try:
            if not self._accumulation.overflowed:
                self._put_mean()
                self.optimizer.step()
                self.stepped = True
        finally:
            self.discard()

    def _put_mean(self) -> None:
        self._accumulation.put_mean(self._params())

    def _check_rates(self) -> None:
        """Warn of a scheduler that is stepped once per micro-batch: it would run through its schedule too fast."""
        rates = [group["lr"] for group in self.param_groups if isinstance(group.get("lr"), float)]
        if self._rates and rates != self._rates:
            warnings.warn(
                "the learning rate changed within an accumulation: step a scheduler only `if optimizer.stepped`, and at "
                "the end of an epoch after optimizer.flush()",
                stacklevel=2,
            )
        self._rates = rates


def _checked_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"Optimizer(optimizer, steps) wraps a torch optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, Optimizer):
        raise ArgumentError(f"the optimizer accumulates already, over {optimizer.steps} micro-batches: wrap it once")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"{type(optimizer).__name__} evaluates its closure several times in a step, so it cannot be fed one micro-batch "
            "after the other: use it unwrapped, and loop over the micro-batches inside the closure"
        )
    return optimizer


def __getattr__(name: str) -> type[Any]:
    """A ready-made one, by the name of torch's."""
    wraps = getattr(torch.optim, name, None)
    if not (isinstance(wraps, type) and issubclass(wraps, torch.optim.Optimizer)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = ready_made(wraps, ReadyMade, Optimizer, place=__name__)
    globals()[name] = made
    return made
