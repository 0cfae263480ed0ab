"""What a script makes of a batch, in terms of torch's functions, so that it can be made again of other samples.

A plain loop can't be run again from the middle. But a worker that is killed leaves its part of a global batch undone, and
the others have to do it in the step that they are in. So what is called between a batch and its backward pass is noted: the
model as a whole, and each function of torch's outside it. That is a loss function, as a rule, and a handful of calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree

from elasticdl.elastic.torch.in_place import Changes, InPlace, attribute_set_by
from elasticdl.elastic.torch.modes import Modes

GET_GRADIENT: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__get__
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
SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_UNNOTED = frozenset({"_set_grad_enabled", "__repr__", "__format__"})
_NOTED_ATTRIBUTES = ("data", "requires_grad")


class CannotRemake(Exception):
    """What the script made of a batch depends on more than the tape knows. The text says on what."""


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

    def __init__(self, sample: Any, settled: Callable[[], Container[int]] = tuple) -> None:
        """``settled``: storages whose content others put back when a step is torn."""
        self._sample = sample
        self._settled = settled
        self._calls: list[_Call] = []
        self._in_place = InPlace(sample)
        self._later: list[Tape] = []  # of batches of the same step
        self._dropped: dict[int, torch.Tensor] = {}  # whose gradients the script has dropped, by ids
        self._is_first_piece = True  # that is made again
        self._known: set[int] = set()  # ids of the tensors that come from the batch
        self._without_gradient: set[int] = set()  # of these, as they were made
        self._last_backward = 0  # so many calls are to be made again
        self._read = ""  # where the script has looked at numbers
        self._doubt = ""  # it did, and has computed further since
        self._obstacle = ""  # why it can't be made again
        for leaf in _pytree.tree_leaves(sample):
            if isinstance(leaf, torch.Tensor):
                self._known.add(id(leaf))
            elif leaf is not None:
                self._obstacle = f"the batches hold a {type(leaf).__name__} beside tensors"

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
                self._read = _place_in_script(name)
            return function(*args, **kwargs)
        self._require_made(_pytree.tree_leaves((args, kwargs)), name)
        versions = [(each, _version_of(each)) for each in args if isinstance(each, torch.Tensor)]
        self._in_place.before(function, args, kwargs)
        result = function(*args, **kwargs)
        for each, before in versions:
            if _version_of(each) != before and not self._in_place.is_kept(each):
                what = f"{_place_in_script(name)} changes a tensor that was there before the batch"
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
        self._require_made(_pytree.tree_leaves((args, kwargs)), type(function).__name__)
        self._note(function, args, kwargs, result, modes)

    def _note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        modes: Modes | None = None,
    ) -> None:
        leaves = _pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) for leaf in (*leaves, *_pytree.tree_leaves(result))):
            if self._read:
                self._doubt = self._read
            self._in_place.after(leaves, result)
            self._add(function, args, kwargs, result, modes)

    def note_backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self._obstacle = self._obstacle or (f"{self._doubt} looks at a number before backward()" if self._doubt else "")
        self._require_made([loss], "backward")
        self._add(BACKWARD, (loss,), kwargs, None)
        self._last_backward = len(self._calls)

    def _require_made(self, leaves: Sequence[Any], name: str) -> None:
        """By functions that are noted."""
        for leaf in leaves:
            if self._obstacle or not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
                continue
            if id(leaf) not in self._known:
                self._obstacle = f"{_place_in_script(name)} takes a tensor that was not made of this batch"
            elif id(leaf) in self._without_gradient:
                self._obstacle = f"{_place_in_script(name)} takes what a torch.autograd.Function has made"

    def note_dropped(self, parameters: Sequence[torch.Tensor], *, zeros: bool = False) -> None:
        """The script drops gradients that it has made for this step. ``zeros``: and puts some of zero in their places."""
        self._dropped.update((id(each), each) for each in parameters)
        self._add(_drop, (list(parameters), zeros), {}, None)

    def begin_remake(self) -> None:
        """`remake` is called next, once for each piece of the batch."""
        self._is_first_piece = True

    def undo(self) -> Changes:
        """What the script has changed in place since it was given this batch is as before. Returns how it was changed."""
        return self._in_place.undo([each._in_place for each in self._later], self._settled())

    def remake(self, sample: Any, backward: Callable[[torch.Tensor, dict[str, Any]], None]) -> dict[int, torch.Tensor]:
        """All that led to the gradients once more, from these samples in the place of the batch's.

        Returns, by the id of each tensor that the script has made, what takes its place.

        ``backward`` is called for each loss, with the keywords that the script gave.

        Raises:
            CannotRemake: it can't be known that this is what the script would have made of them.
        """
        if self._obstacle or not self._last_backward:
            raise CannotRemake(self._obstacle or "there was no loss.backward()")
        calls = self._calls[: self._last_backward]
        calls += [each for each in self._calls[self._last_backward :] if each.function is _drop]
        with self._in_place.undone([each._in_place for each in self._later], self._settled()), self._own_gradients():
            return self._remake(calls, sample, backward)

    def _remake(
        self, calls: Sequence[_Call], sample: Any, backward: Callable[[torch.Tensor, dict[str, Any]], None]
    ) -> dict[int, torch.Tensor]:
        present: dict[int, Any] = {}
        _pair(self._sample, sample, present)

        def exchanged(leaf: Any) -> Any:
            return present.get(id(leaf), leaf)

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

    @contextlib.contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Within, gradients that the script drops are those of this piece alone. What other pieces of the batch have made is added
        afterwards; what batches before it have made is dropped."""
        earlier = [(each, each.grad) for each in self._dropped.values()]
        for each, _ in earlier:
            each.grad = None
        yield
        if not self._is_first_piece:
            for each, before in earlier:
                if before is not None:
                    each.grad = before if each.grad is None else each.grad + before
        self._is_first_piece = False

    def _add(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        modes: Modes | None = None,
    ) -> None:
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                self._without_gradient.discard(id(leaf))  # it has one since this call
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._known.add(id(leaf))
                if leaf.grad_fn is None:
                    self._without_gradient.add(id(leaf))
            elif not isinstance(leaf, SIMPLE):
                self._obstacle = self._obstacle or f"the model returns a {type(leaf).__name__}"
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        self._calls.append(_Call(function, args, kwargs, result, torch.is_grad_enabled(), autocast, modes))


def _drop(parameters: list[torch.Tensor], zeros: bool) -> None:
    for each in parameters:
        each.grad = torch.zeros_like(each) if zeros else None


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _of_another_dimension(tensor: torch.Tensor, dim: int | None = None) -> bool:
    """Than the first, which is that of the samples."""
    return dim is not None and dim % max(tensor.dim(), 1) != 0


def _pair(before: Any, after: Any, present: dict[int, Any]) -> None:
    old, shape = _pytree.tree_flatten(before)
    new, new_shape = _pytree.tree_flatten(after)
    if shape != new_shape:
        raise CannotRemake("other samples give a result of another structure")
    for each, other in zip(old, new, strict=True):
        if isinstance(each, torch.Tensor):
            present[id(each)] = other


def _place_in_script(what: str) -> str:
    """``FILE:LINE: WHAT``, of the nearest frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "elasticdl"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: {what}"


class Listener(Protocol):
    """Who wants to know what the script does with a batch."""

    def before_look(self, tensor: torch.Tensor) -> None:
        """The script looks at a tensor's gradient."""

    def before_set(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The script replaces a tensor's gradient."""

    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """The script calls ``loss.backward``."""


class _NoWatch:
    """What a copy of the model has in the place of a `Watch`: never active."""

    _active, _within = False, 0

    def _enter_model(self, *_: Any, **__: Any) -> None: ...

    def _leave_model(self, *_: Any, **__: Any) -> None: ...


class Watch(TorchFunctionMode):
    """Sees the functions of torch's that the script calls while it works on a batch."""

    def __init__(self, model: torch.nn.Module, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._tape: Tape | None = None
        self._active = False
        self._within = 0  # calls of the model, one in another
        self._modes: Modes | None = None  # in which it was called
        model.register_forward_pre_hook(self._enter_model, prepend=True)
        model.register_forward_hook(self._leave_model, with_kwargs=True, always_call=True)

    def __reduce__(self) -> tuple[type[_NoWatch], tuple[()]]:
        return _NoWatch, ()

    def start(self, tape: Tape | None) -> None:
        """``tape``: what is to be noted is noted there."""
        self._tape = tape
        if not self._active:
            self._active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop_noting(self) -> None:
        self._tape = None

    def stop(self) -> None:
        self._tape = None
        if self._active and self._is_innermost:
            self._active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def _is_innermost(self) -> bool:
        return _get_current_function_mode() is self  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, torch's functions are called as ever."""
        pausing = self._active and self._is_innermost
        if pausing:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if pausing:
                self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == GET_GRADIENT:
            self._listener.before_look(args[0])
        elif func is BACKWARD:
            given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False))
            return self._listener.backward(args[0], {**given, **kwargs})
        elif attribute_set_by(func) == "grad":
            self._listener.before_set(args[0], args[1] if len(args) > 1 else None)
        elif self._tape is not None and not self._within:
            return self._tape.call(func, args, kwargs)
        return func(*args, **kwargs)

    def _enter_model(self, model: torch.nn.Module, args: Any) -> None:
        if self._active and not self._within and self._is_innermost:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._within = 1
            self._modes = Modes(model) if self._tape is not None else None
        elif self._within:
            self._within += 1

    def _leave_model(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if not self._within:
            return
        self._within -= 1
        if not self._within:
            if self._tape is not None:
                self._tape.note(model, args, kwargs, result, self._modes)
            self.__enter__()  # type: ignore[no-untyped-call]
