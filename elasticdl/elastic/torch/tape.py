"""What a script makes of a batch, in terms of torch's functions, so that it can be made again of other samples.

A plain loop can't be run again from the middle. But a worker that is killed leaves its part of a global batch undone, and
the others have to do it in the step that they are in. So what is called between a batch and its backward pass is noted: the
model as a whole, and each function of torch's outside it. That is a loss function, as a rule, and a handful of calls.

With it who watches the script's calls, and in which mode a model was called.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import ReferenceType, ref

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.elastic.torch.loop_faults import (
    COPIED_ON_ITS_WAY,
    ORDERS,
    OTHER_THREAD,
    Changes,
    InPlace,
    attribute_set_by,
    place_in_script,
    require_one_order,
    require_own,
    works_on_another_batch,
)
from elasticdl.elastic.torch_kit.buffers import modules_of
from elasticdl.elastic.training.nested import leaves as leaves_of

# Which tensors come of a batch: whether the script works on the one that it was given last.

V = TypeVar("V")


class OfTensors(Generic[V]):
    """What belongs to tensors, of which this keeps none."""

    def __init__(self) -> None:
        # The id of one that is gone may be another's by now. (WeakIdKeyDictionary of torch takes four times as long.)
        self._known: dict[int, tuple[ReferenceType[torch.Tensor], V]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def put(self, tensor: torch.Tensor, value: V) -> None:
        self._known[id(tensor)] = ref(tensor), value

    def get(self, leaf: Any) -> V | None:
        known = self._known.get(id(leaf))
        return known[1] if known is not None and known[0]() is leaf else None

    def items(self) -> Iterator[tuple[torch.Tensor, V]]:
        """Of those that are still there."""
        return ((tensor, value) for of, value in self._known.values() if (tensor := of()) is not None)


class Trace:
    """Of one batch."""

    def __init__(self, sample: Any, unused: Sequence[Trace]) -> None:
        """``unused``: of batches before it in the same loop, of which no gradients were made."""
        self._made: OfTensors[bool] = OfTensors()
        for leaf in leaves_of(sample):
            if isinstance(leaf, torch.Tensor):
                self._made.put(leaf, True)
        self.unused = list(unused)
        self.is_untouched = True  # nothing was called
        self.is_for_model = False  # which was called
        self.looks_at_size = ""  # where the script has looked last at the number of samples, and has done nothing since

    def look_at_size(self, tensor: torch.Tensor, place: str) -> None:
        if self._made.get(tensor):
            self.looks_at_size = place

    def follow(self, given: Sequence[Any], result: Any, is_new: Callable[[torch.Tensor], bool]) -> None:
        """The script has called something. ``is_new``: of a tensor that was not there before the batch."""
        self.is_untouched, self.looks_at_size = False, ""
        if self._has_any(given):
            for leaf in leaves_of(result):
                if isinstance(leaf, torch.Tensor) and is_new(leaf):
                    self._made.put(leaf, True)

    def require_present(self, given: Sequence[Any], place: Callable[[], str]) -> None:
        """Raises:
        UserError: the script calls something with a batch that it was given before, and not with this one.
        """
        if any(each._has_any(given) for each in self.unused) and not self._has_any(given):
            raise UserError(works_on_another_batch(place()))

    def _has_any(self, leaves: Sequence[Any]) -> bool:
        return any(self._made.get(leaf) for leaf in leaves)


# In which state a model was called, so that it can be called so again, when the script has gone on.

_PLAIN = (bool, int, float, str, type(None))


class OtherParameters(ElasticDLError):
    """The model has not those parameters now."""


class Modes:
    """Of a model and its modules: whether they train, what numbers the script's own ones hold, and which parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = modules_of([model])
        self._training = [each.training for each in self._modules]
        self.trains = any(self._training)
        self._numbers = [(each, _numbers_of(each)) for each in self._modules if not _is_of_torch(each)]
        self._parameters = self._present_parameters()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, the model is as it was; afterwards as it is now.

        Raises:
            OtherParameters: it was called with others than its own.
        """
        if self._present_parameters() != self._parameters:
            raise OtherParameters(
                "the model was called with other parameters than its own, as by torch.func.functional_call"
            )
        training = [each.training for each in self._modules]
        numbers = [(each, _numbers_of(each)) for each, _ in self._numbers]
        self._put(self._training, self._numbers)
        try:
            yield
        finally:
            self._put(training, numbers)

    def _put(self, training: list[bool], numbers: list[tuple[torch.nn.Module, dict[str, Any]]]) -> None:
        for module, value in zip(self._modules, training, strict=True):
            if module.training != value:
                module.training = value
        for module, values in numbers:
            vars(module).update(values)

    def _present_parameters(self) -> list[int]:
        return [id(parameter) for module in self._modules for parameter in module._parameters.values()]


def _is_of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _numbers_of(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}


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


# Sees what a script calls of torch's functions while it works on a batch, and has a `Tape` note it.

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
