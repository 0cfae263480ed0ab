"""What a script makes of a batch, in terms of torch's functions, so that it can be made again of other samples.

A plain loop can't be run again from the middle. But a worker that is killed leaves its part of a global batch undone, and
the others have to do it in the step that they are in. So what is called between a batch and its backward pass is noted: the
model as a whole, and each function of torch's outside it. That is a loss function, as a rule, and a handful of calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree

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
_UNNOTED = frozenset({"_set_grad_enabled", "__set__", "__repr__", "__format__"})


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


class Tape:
    """Of one batch, from its being given to its last backward pass."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample
        self._calls: list[_Call] = []
        self._known: set[int] = set()  # ids of the tensors that come from the batch
        self._last_backward = 0  # so many calls are to be made again
        self._read = ""  # where the script has looked at numbers
        self._doubt = ""  # it did, and has computed further since
        self._obstacle = ""  # why it can't be made again
        for leaf in _pytree.tree_leaves(sample):
            if isinstance(leaf, torch.Tensor):
                self._known.add(id(leaf))
            elif leaf is not None:
                self._obstacle = f"the batches hold a {type(leaf).__name__} beside tensors"

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(function, "__name__", "")
        if name in _UNNOTED:
            return
        if name in _NAMES_OF_READS or function == _SHAPE:
            if not (name == "size" and _of_another_dimension(*args, **kwargs)):
                self._read = _place_in_script(name)
            return
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return
        if self._read:
            self._doubt = self._read
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and id(leaf) not in self._known:
                self._obstacle = (
                    self._obstacle or f"{_place_in_script(name)} takes a tensor that was not made of this batch"
                )
        self._add(function, args, kwargs, result)

    def note_backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self._obstacle = self._obstacle or (f"{self._doubt} looks at a number before backward()" if self._doubt else "")
        self._add(BACKWARD, (loss,), kwargs, None)
        self._last_backward = len(self._calls)

    def remake(self, sample: Any, backward: Callable[[torch.Tensor, dict[str, Any]], None]) -> dict[int, torch.Tensor]:
        """All that led to the gradients once more, from these samples in the place of the batch's.

        Returns, by the id of each tensor that the script has made, what takes its place.

        ``backward`` is called for each loss, with the keywords that the script gave.

        Raises:
            CannotRemake: it can't be known that this is what the script would have made of them.
        """
        if self._obstacle or not self._last_backward:
            raise CannotRemake(self._obstacle or "there was no loss.backward()")
        return self._remake(self._calls[: self._last_backward], sample, backward)

    def remake_number(self, value: Any, sample: Any) -> float:
        """What the script would have in the place of ``value`` now, from these samples in the place of the batch's.

        Raises:
            CannotRemake: it can't be known.
        """
        doubt = f"{self._doubt} looks at a number before elastic.mean()" if self._doubt else ""
        if self._obstacle or doubt:
            raise CannotRemake(self._obstacle or doubt)
        made = self._remake(self._calls, sample, lambda loss, kwargs: None).get(id(value))
        if made is None:
            raise CannotRemake("elastic.mean() was given what is no tensor, or none that was made of this batch")
        return float(made.detach())

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
                if call.function is BACKWARD:
                    backward(args[0], kwargs)
                else:
                    _pair(call.result, call.function(*args, **kwargs), present)
        return present

    def _add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._known.add(id(leaf))
            elif not isinstance(leaf, SIMPLE):
                self._obstacle = self._obstacle or f"the model returns a {type(leaf).__name__}"
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        self._calls.append(_Call(function, args, kwargs, result, torch.is_grad_enabled(), autocast))


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
        elif self._tape is not None and not self._within:
            result = func(*args, **kwargs)
            self._tape.note(func, args, kwargs, result)
            return result
        return func(*args, **kwargs)

    def _enter_model(self, model: torch.nn.Module, args: Any) -> None:
        if self._active and not self._within and self._is_innermost:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._within = 1
        elif self._within:
            self._within += 1

    def _leave_model(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if not self._within:
            return
        self._within -= 1
        if not self._within:
            self.__enter__()  # type: ignore[no-untyped-call]
            if self._tape is not None:
                self._tape.note(model, args, kwargs, result)
