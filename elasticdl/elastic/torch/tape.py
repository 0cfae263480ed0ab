"""What a script makes of a batch, in terms of torch's functions, so that it can be made again of other samples.

A plain loop can't be run again from the middle. But a worker that is killed leaves its part of a global batch undone, and
the others have to do it in the step that they are in. So what is called between a batch and its backward pass is noted: the
model as a whole, and each function of torch's outside it. That is a loss function, as a rule, and a handful of calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from elasticdl.common.errors import ElasticDLError
from elasticdl.elastic.torch.in_place import Changes, InPlace, attribute_set_by
from elasticdl.elastic.torch.loop_faults import place_in_script, require_own
from elasticdl.elastic.torch.modes import Modes
from elasticdl.elastic.torch.trace import OfTensors, Trace
from elasticdl.elastic.training.tree import leaves as leaves_of

BACKWARD = torch.Tensor.backward
_SHAPE: Callable[..., Any] = vars(torch._C.TensorBase)["shape"].__get__
_NAMES_OF_READS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "size",
        "numel",
        "__array__",
        "__len__",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    }
)
_NAMES_OF_SIZES = ("size", "numel", "__len__")
SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
_UNNOTED = frozenset({"_set_grad_enabled", "__repr__", "__format__"})
_NOTED_ATTRIBUTES = ("data", "requires_grad")


class CannotRemake(ElasticDLError):
    """What the script made of a batch depends on more than the tape knows. The text says on what."""


class _Made:
    """Stands for a tensor that comes of the batch: a tape keeps none of them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    with_gradient: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # devices on which it is enabled
    modes: Modes | None = None  # of the model


class Tape:
    """Of one batch, from its being given to its last backward pass."""

    def __init__(
        self,
        sample: Any,
        settled: Callable[[], Container[int]] = tuple,
        *,
        unused: Sequence[Trace] = (),
        may_be_torn: bool = True,
        kept: Container[int] = (),
    ) -> None:
        """``settled``: storages whose content others put back when a step is torn. ``unused``: of batches before it in the same loop,
        of which no gradients were made. ``may_be_torn``: else it is only noted what comes of the batch.
        ``kept``: storages of what the model has answered on the way here."""
        self._kept = kept
        self._settled = settled
        self._calls: list[_Call] = []
        self._in_place = InPlace(sample)
        self._later: list[Tape] = []  # of batches of the same step
        self._may_be_torn = may_be_torn
        self._trains = False  # the model was called in training
        self.trace = Trace(sample, unused)
        # What stands for the tensors that come of the batch and are still there.
        self._made: OfTensors[_Made] = OfTensors()
        self._without_gradient: set[_Made] = set()  # as they were made
        self._last_backward = 0  # so many calls are to be made again
        self._read = ""  # where the script has looked at numbers
        self._doubt = ""  # it did, and has computed further since
        self._obstacle = ""  # why it can't be made again
        for leaf in leaves_of(sample):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                self._obstacle = f"the batches hold a {type(leaf).__name__} beside tensors"
        self._given = self._name(sample)
        self._without_gradient.clear()

    def followed_by(self, tape: Tape) -> None:
        """The script goes on to another batch of the same step."""
        self._later.append(tape)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The script calls it."""
        name = getattr(function, "__name__", "")
        if name in _UNNOTED or attribute_set_by(function) not in ("", *_NOTED_ATTRIBUTES):
            return function(*args, **kwargs)
        if name in _NAMES_OF_READS or function == _SHAPE:
            if not (name == "size" and _of_another_dimension(*args, **kwargs)):
                self._read = place_in_script(name)
                if name in _NAMES_OF_SIZES or function == _SHAPE:
                    self.trace.look_at_size(args[0], self._read)
            return function(*args, **kwargs)
        self.require_present(args, kwargs)
        if not self._may_be_torn:
            result = function(*args, **kwargs)
            self._trace(leaves_of((args, kwargs)), result)
            return result
        self._require_made(leaves_of((args, kwargs)), name)
        versions = [(each, _version_of(each)) for each in args if isinstance(each, torch.Tensor)]
        self._in_place.before(function, args, kwargs)
        result = function(*args, **kwargs)
        for each, before in versions:
            if _version_of(each) != before and not self._in_place.is_kept(each):
                what = f"{place_in_script(name)} changes a tensor that was there before the batch"
                self._obstacle = self._obstacle or what
        self._note(function, args, kwargs, result)
        return result

    def note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        modes: Modes | None = None,
    ) -> None:
        """The script has called it. ``modes``: in which the model was, if it is the model."""
        self.require_present(args, kwargs)
        self.require_own(args, kwargs)
        self._trains = self._trains or (modes is not None and modes.trains)
        self.trace.is_for_model = True
        if not self._may_be_torn:
            self._trace(leaves_of((args, kwargs)), result)
            return
        self._require_made(leaves_of((args, kwargs)), type(function).__name__)
        self._note(function, args, kwargs, result, modes)

    def _note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        modes: Modes | None = None,
    ) -> None:
        leaves = leaves_of((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) for leaf in (*leaves, *leaves_of(result))):
            if self._read:
                self._doubt = self._read
            self._trace(leaves, result)
            self._add(function, args, kwargs, result, modes)

    def _trace(self, leaves: Sequence[Any], result: Any) -> None:
        self._in_place.after(leaves, result)
        self.trace.follow(leaves, result, self._in_place.is_made)

    def require_present(self, args: Any, kwargs: Any) -> None:
        """As `Trace.require_present`."""
        if self.trace.unused:
            self.trace.require_present(leaves_of((args, kwargs)), lambda: place_in_script(""))

    def require_own(self, args: Any, kwargs: Any) -> None:
        """As `loop_faults.require_own`: the model is called."""
        if self._kept:
            require_own((args, kwargs), self._kept)

    def note_backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self._obstacle = self._obstacle or (f"{self._doubt} looks at a number before backward()" if self._doubt else "")
        self._require_made([loss], "backward")
        self._add(BACKWARD, (loss,), kwargs, None)
        self._last_backward = max(len(self._calls), 1)  # 1 where an obstacle has cleared them

    def _require_made(self, leaves: Sequence[Any], name: str) -> None:
        """By functions that are noted."""
        for leaf in leaves:
            if self._obstacle or not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
                continue
            if (made := self._made.get(leaf)) is None:
                self._obstacle = f"{place_in_script(name)} takes a tensor that was not made of this batch"
            elif made in self._without_gradient:
                self._obstacle = f"{place_in_script(name)} takes what a torch.autograd.Function has made"

    def note_dropped(self) -> None:
        """The script drops gradients that it has made for this step."""
        self._obstacle = self._obstacle or f"{place_in_script('')}: gradients are dropped before the step"

    def look_at_gradient(self, tensor: torch.Tensor) -> None:
        """The script may compute further with it, as in adversarial training."""
        if self._made.get(tensor):
            self._obstacle = self._obstacle or f"{place_in_script('')} looks at the gradient of what comes of the batch"

    @property
    def is_lost(self) -> bool:
        """The gradients that were made of this batch can't be made again, whatever the samples."""
        return bool(self._obstacle and self._last_backward)

    def undo(self) -> Changes:
        """What the script has changed in place since it was given this batch is as before. Returns how it was changed."""
        return self._in_place.undo([each._in_place for each in self._later], self._settled())

    def remake(
        self, sample: Any, backward: Callable[[torch.Tensor, dict[str, Any]], None]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All that led to the gradients once more, from these samples in the place of the batch's.

        Returns the tensors that the script has made of the batch and still has, each with what takes its place.

        ``backward`` is called for each loss, with the keywords that the script gave.

        Raises:
            CannotRemake: it can't be known that this is what the script would have made of them.
        """
        if not self._last_backward and not self._trains:
            return []  # it has led to nothing
        if self._obstacle or not self._last_backward:
            raise CannotRemake(self._obstacle or "there was no loss.backward()")
        with self._in_place.undone([each._in_place for each in self._later], self._settled()):
            made = self._remake(self._calls[: self._last_backward], sample, backward)
        return [(each, made[name]) for each, name in self._made.items() if name in made]

    def remake_number(self, value: Any, sample: Any) -> float:
        """What the script would have in the place of ``value`` now, from these samples in the place of the batch's.

        Raises:
            CannotRemake: it can't be known.
        """
        doubt = f"{self._doubt} looks at a number before elastic.mean()" if self._doubt else ""
        if self._obstacle or doubt:
            raise CannotRemake(self._obstacle or doubt)
        with self._in_place.undone([each._in_place for each in self._later], self._settled()):
            every = self._remake(self._calls, sample, lambda loss, kwargs: None)
        made = every.get(self._made.get(value))
        if made is None:
            raise CannotRemake("elastic.mean() was given what is no tensor, or none that was made of this batch")
        return float(made.detach())

    def _remake(
        self, calls: Sequence[_Call], sample: Any, backward: Callable[[torch.Tensor, dict[str, Any]], None]
    ) -> dict[_Made | None, torch.Tensor]:
        present: dict[_Made | None, torch.Tensor] = {}
        _pair(self._given, sample, present)

        def exchanged(leaf: Any) -> Any:
            return present[leaf] if type(leaf) is _Made else leaf

        for call in calls:
            args, kwargs = _pytree.tree_map(exchanged, (call.args, call.kwargs))
            with contextlib.ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(call.with_gradient))
                for device, dtype in call.autocast:
                    modes.enter_context(torch.autocast(device, dtype=dtype))
                if call.modes is not None:
                    modes.enter_context(call.modes.held())
                if call.function is BACKWARD:
                    backward(args[0], kwargs)
                else:
                    _pair(call.result, call.function(*args, **kwargs), present)
        return present

    def _add(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        modes: Modes | None = None,
    ) -> None:
        for leaf in leaves_of((args, kwargs)):
            if (made := self._made.get(leaf)) is not None and leaf.grad_fn is not None:
                self._without_gradient.discard(made)  # it has one since this call
        if others := [each for each in leaves_of(result) if not isinstance(each, (torch.Tensor, *SIMPLE))]:
            self._obstacle = self._obstacle or f"the model returns a {type(others[0]).__name__}"
        if self._obstacle:
            self._calls.clear()  # and what they hold
            return
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )

        args, kwargs = _mapped(lambda leaf: self._made.get(leaf) or leaf, (args, kwargs))
        result = self._name(result)
        self._calls.append(_Call(function, args, kwargs, result, torch.is_grad_enabled(), autocast, modes))

    def _name(self, made: Any) -> Any:
        """``made`` with what stands for its tensors in their places."""

        def named(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            name = _Made()
            self._made.put(leaf, name)
            if leaf.grad_fn is None:
                self._without_gradient.add(name)
            return name

        return _mapped(named, made)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """As `_pytree.tree_map`, which takes longer."""
    if type(value) is tuple:
        return tuple(_mapped(function, each) for each in value)
    if type(value) is dict:
        return {key: _mapped(function, each) for key, each in value.items()}
    return function(value) if isinstance(value, (torch.Tensor, *SIMPLE)) else _pytree.tree_map(function, value)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _of_another_dimension(tensor: torch.Tensor, dim: int | None = None) -> bool:
    """Than the first, which is that of the samples."""
    return dim is not None and dim % max(tensor.dim(), 1) != 0


def _pair(before: Any, after: Any, present: dict[_Made | None, torch.Tensor]) -> None:
    old, shape = _pytree.tree_flatten(before)
    new, new_shape = _pytree.tree_flatten(after)
    if shape != new_shape:
        raise CannotRemake("other samples give a result of another structure")
    present.update({each: other for each, other in zip(old, new, strict=True) if type(each) is _Made})
