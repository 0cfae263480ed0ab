"""Sees what a script calls of torch's functions while it works on a batch, and has a `Tape` note it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.in_place import attribute_set_by
from elasticdl.elastic.torch.loop_faults import COPIED_ON_ITS_WAY, ORDERS, OTHER_THREAD, require_one_order
from elasticdl.elastic.torch.modes import Modes
from elasticdl.elastic.torch.tape import BACKWARD, Tape

GET_GRADIENT: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__get__
GRADIENT_BY = torch.autograd.grad


class Listener(Protocol):
    """Who wants to know what the script does with a batch."""

    @property
    def is_on_its_way(self) -> bool:
        """What the script does has no effect, and its model is not the job's."""

    def before_look(self, tensor: torch.Tensor) -> None:
        """The script looks at a tensor's gradient."""

    def before_set(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The script replaces a tensor's gradient."""

    def before_grad(self, inputs: Sequence[torch.Tensor]) -> None:
        """The script calls ``torch.autograd.grad`` by these."""

    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """The script calls ``loss.backward``."""


class _NoWatch:
    """What a copy of the model has in the place of a `Watch`: never active."""

    _active, _within, _tape = False, 0, None

    def __init__(self, is_late: bool = False) -> None:
        """``is_late``: the model had not got the job's parameters."""
        self._is_late = is_late

    def _enter_model(self, *_: Any, **__: Any) -> None:
        """In a loop of the job's, and not in one on the way there, nor between two loops.

        Raises:
            UserError: others have another model.
        """
        if self._is_late and isinstance(_get_current_function_mode(), Watch):  # type: ignore[no-untyped-call]
            raise UserError(COPIED_ON_ITS_WAY)

    def __deepcopy__(self, _: Any) -> _NoWatch:
        return _NoWatch(self._is_late)

    def _leave_model(self, *_: Any, **__: Any) -> None: ...


class Watch(TorchFunctionMode):
    """Sees the functions of torch's that the script calls while it works on a batch."""

    def __init__(self, model: torch.nn.Module, listener: Listener) -> None:
        super().__init__()
        _hide_from_compiler()
        self._listener, self._model = listener, model
        self._tape: Tape | None = None
        self._active = False
        self._thread = 0  # that loops over the batches
        self._within = 0  # calls of the model, one in another
        self._modes: Modes | None = None  # in which it was called
        model.register_forward_pre_hook(self._enter_model, prepend=True)
        model.register_forward_hook(self._leave_model, with_kwargs=True, always_call=True)

    def __reduce__(self) -> tuple[type[_NoWatch], tuple[bool]]:
        return _NoWatch, (self._listener.is_on_its_way,)

    def start(self, tape: Tape | None) -> None:
        """``tape``: what is to be noted is noted there."""
        self._tape, self._thread = tape, threading.get_ident()
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
    def is_active(self) -> bool:
        return self._active

    @property
    def _is_innermost(self) -> bool:
        return _get_current_function_mode() is self  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, torch's functions are called as ever.

        Raises:
            UserError: another thread loops over the batches.
        """
        if self._thread not in (0, threading.get_ident()):
            raise UserError(OTHER_THREAD)
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
        if func is GRADIENT_BY:
            inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
            self._listener.before_grad([inputs] if isinstance(inputs, torch.Tensor) else inputs)
        if func == GET_GRADIENT:
            self._listener.before_look(args[0])
        elif func is BACKWARD:
            given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False))
            return self._listener.backward(args[0], {**given, **kwargs})
        elif attribute_set_by(func) == "grad":
            self._listener.before_set(args[0], args[1] if len(args) > 1 else None)
        elif self._tape is not None and not self._within:
            if getattr(func, "__name__", "") in ORDERS and self._model.training:
                require_one_order(kwargs.get("generator"), sys._getframe(1).f_globals.get("__name__", ""))
            return self._tape.call(func, args, kwargs)
        return func(*args, **kwargs)

    def _enter_model(self, model: torch.nn.Module, args: Any) -> None:
        if isinstance(self, _NoWatch):  # a copy has this function, and not that one's
            self._enter_model()
        elif self._active and not self._within and self._is_innermost:
            if self._tape is not None:
                with self.paused():  # how the tape looks at these tensors is no call of the script's
                    self._tape.require_present(args, {})
                    self._tape.require_own(args, {})
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


@functools.cache
def _hide_from_compiler() -> None:
    """A script may compile the prepared model, or a step that calls it: the hooks are called as they are. No decorators, as these import the compiler."""
    for name in ("_enter_model", "_leave_model"):
        setattr(Watch, name, torch.compiler.disable(getattr(Watch, name)))  # type: ignore[no-untyped-call]
